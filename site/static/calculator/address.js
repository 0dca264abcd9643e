// The state in the address: what differs from the start, a pinned state, and a configuration of one's own.

// What an address says, as {state, pinned, config}; pinned and config are null where it has none.
export function read(hash, page) {
  const said = new URLSearchParams(hash.slice(1));
  const pinned = said.get("pinned");
  return {
    state: stateIn(said, page),
    pinned: pinned === null ? null : stateIn(new URLSearchParams(pinned), page),
    config: said.get("config"),
  };
}

function stateIn(said, page) {
  const state = { ...page.start };
  for (const { name, kind, values } of page.controls) {
    if (!said.has(name)) continue;
    const raw = said.get(name);
    const known = values.find((value) => String(value) === raw);
    // What is not offered is asked too, and refused with its reason: another answer would be to another question.
    state[name] = known ?? (kind === "number" && /^\d+(\.\d+)?$/.test(raw) ? Number(raw) : raw);
  }
  return state;
}

export function differing(state, page) {
  const said = new URLSearchParams();
  for (const { name } of page.controls) if (state[name] !== page.start[name]) said.set(name, state[name]);
  return said;
}

export function write(state, pinned, config, page) {
  const said = differing(state, page);
  if (pinned) said.set("pinned", differing(pinned, page));
  if (config) said.set("config", config);
  history.replaceState(null, "", said.size ? `#${said}` : location.pathname + location.search);
}

const through = (blob, stream) => new Response(blob.stream().pipeThrough(stream));

// A configuration as a part of an address, and back.
export async function pack(text) {
  const bytes = new Uint8Array(await through(new Blob([text]), new CompressionStream("deflate-raw")).arrayBuffer());
  const letters = btoa(String.fromCharCode(...bytes));
  return letters.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export async function unpack(packed) {
  const letters = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(letters, (letter) => letter.codePointAt(0));
  return through(new Blob([bytes]), new DecompressionStream("deflate-raw")).text();
}
