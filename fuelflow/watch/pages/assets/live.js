// Following a run: the server says what is new, numbered, and the browser asks again
// from the number it has when the connection breaks.

const RETRY_MS = 3000;

function follow(address, { onReset, onAdd, onState, isOver }) {
  const source = new EventSource(address);
  source.addEventListener("open", () => onState("live"));
  source.addEventListener("reset", (event) => onReset(JSON.parse(event.data)));
  source.addEventListener("add", (event) => onAdd(JSON.parse(event.data)));
  source.addEventListener("error", () => {
    if (isOver()) { source.close(); onState("over"); return; }
    onState("lost");
    // A refusal ends an event source for good; a broken connection does not.
    if (source.readyState === EventSource.CLOSED) {
      setTimeout(() => follow(address, { onReset, onAdd, onState, isOver }), RETRY_MS);
    }
  });
}
