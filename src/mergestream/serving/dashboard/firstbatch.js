// Shown before the first batch: how to send one.

import { hasToken } from "./api.js";
import { create } from "./dom.js";

const commandOf = () => {
  const address = new URL("v1/streams/my-scanner/batches", document.baseURI);
  const token = hasToken() ? ' -H "Authorization: Bearer $TOKEN"' : "";
  return `curl${token} -F images=@one.png -F images=@two.png ${address.origin}${address.pathname}`;
};

let shown = null;

export const firstBatch = () => {
  const command = commandOf();
  if (shown?.dataset.command === command) return shown;
  const code = create("code", {}, command);
  const copy = create("button", { type: "button", class: "small", onclick: () => copied(code, copy) }, "Copy");
  shown = create(
    "div",
    { class: "card empty", "data-command": command },
    create("h2", {}, "No stream yet"),
    create(
      "p",
      {},
      "A stream begins with its first batch: PNG, JPEG or DICOM files, or one NumPy array. " +
        "Name it after a site or a scanner, never after a patient.",
    ),
    create("pre", { tabindex: 0 }, code),
    copy,
    create("p", { class: "quiet" }, "It appears here within a second."),
  );
  return shown;
};

// Without HTTPS there is no clipboard: the command is selected instead.
const copied = async (code, button) => {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected: press Ctrl+C";
  }
};
