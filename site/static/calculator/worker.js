// Runs vramlab under Pyodide, away from the page's own thread. Everything it loads lies beside it.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const bridge = (async () => {
  const [python, archive] = await Promise.all([
    loadPyodide(),
    fetch(new URL("vramlab.zip", import.meta.url)).then((answer) => answer.arrayBuffer()),
  ]);
  python.unpackArchive(archive, "zip", { extractDir: "/vramlab" });
  python.runPython("import sys; sys.path[:0] = ['/vramlab/helpers', '/vramlab']");
  return python.pyimport("bridge");
})();

self.onmessage = async ({ data: { id, call, args } }) => {
  try {
    self.postMessage({ id, result: JSON.parse((await bridge)[call](...args)) });
  } catch (error) {
    self.postMessage({ id, result: { error: `The calculator failed: ${error.message.trim().split("\n").at(-1)}` } });
  }
};
