// Runs vramlab under Pyodide, away from the page's own thread. Everything it loads lies beside it.
import { loadPyodide } from "./pyodide/pyodide.mjs";

// Counts what comes, for the page's bar.
const fetchPlainly = self.fetch.bind(self);
let loaded = 0;
let told = 0;
self.fetch = async (...args) => {
  const answer = await fetchPlainly(...args);
  if (!answer.ok || !answer.body) return answer;
  const count = new TransformStream({
    transform(chunk, out) {
      loaded += chunk.byteLength;
      if (performance.now() - told > 100) {
        told = performance.now();
        self.postMessage({ loaded });
      }
      out.enqueue(chunk);
    },
    flush: () => self.postMessage({ loaded }),
  });
  const { status, statusText, headers } = answer;
  return new Response(answer.body.pipeThrough(count), { status, statusText, headers });
};

const bridge = (async () => {
  const [python, archive] = await Promise.all([
    loadPyodide(),
    self.fetch(new URL("vramlab.zip", import.meta.url)).then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/vramlab" });
  python.runPython("import sys; sys.path[:0] = ['/vramlab/helpers', '/vramlab']");
  return python.pyimport("bridge");
})();

const lastLine = (error) => error.message.trim().split("\n").at(-1);
bridge.then(
  () => self.postMessage({ ready: true }),
  (error) => self.postMessage({ failed: `Python did not start here (${lastLine(error)})` }),
);

self.onmessage = async ({ data: { id, call, args } }) => {
  try {
    self.postMessage({ id, result: JSON.parse((await bridge)[call](...args)) });
  } catch (error) {
    self.postMessage({ id, result: { error: `The calculator failed: ${lastLine(error)}` } });
  }
};
