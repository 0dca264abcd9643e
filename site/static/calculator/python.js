// vramlab, in a worker: questions wait until Python is there.
let worker;
let calls = 0;
const waiting = new Map();

// Starts Python; `told` hears how many bytes have come. Resolves when it can be asked.
export function startPython(told) {
  return new Promise((resolve, reject) => {
    worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.loaded !== undefined) return told(data.loaded);
      if (data.failed) return reject(new Error(data.failed));
      if (data.ready) return resolve();
      waiting.get(data.id)(data.result);
      waiting.delete(data.id);
    };
    worker.onerror = () => reject(new Error("Python did not start here"));
  });
}

export function ask(call, ...args) {
  return new Promise((resolve) => {
    calls += 1;
    waiting.set(calls, resolve);
    worker.postMessage({ id: calls, call, args });
  });
}
