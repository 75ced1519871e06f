"""What ``fuelflow demo`` trains and shows, written as a user's own script would be."""
