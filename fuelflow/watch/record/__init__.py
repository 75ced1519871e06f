"""The records that a run leaves: all that is known of it to who watches."""
