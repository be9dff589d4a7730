// Actions of administrators: confirmed first, then done and announced. Problems are shown in the service's words.

import * as api from "./api.js";
import { byId, create, say } from "./dom.js";

const confirmed = (title, text, yes) =>
  new Promise((resolve) => {
    const dialog = byId("confirm");
    say(byId("confirm-title"), title);
    say(byId("confirm-text"), text);
    say(byId("confirm-yes"), yes);
    dialog.returnValue = "no";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });

export const showError = (what, error) => {
  const message = create(
    "div",
    { class: "message error", role: "alert" },
    create(
      "p",
      {},
      create("b", {}, `${what} `),
      error.message,
      " ",
      error.code ? create("code", {}, error.code) : null,
    ),
    create("button", { type: "button", class: "small", onclick: () => message.remove() }, "Dismiss"),
  );
  byId("messages").replaceChildren(message);
};

// onDone: update the page; onRefused: the token does not allow it.
export const createActions = ({ onDone, onRefused, onDeleted }) => {
  const act = async (question, call, done) => {
    if (!(await confirmed(...question))) return false;
    try {
      await call();
      byId("messages").replaceChildren();
      say(byId("announcement"), done);
      return true;
    } catch (error) {
      showError(`${question[2]} failed.`, error);
      if (error.status === 401 || error.status === 403) onRefused(error);
      return false;
    } finally {
      onDone();
    }
  };
  return {
    reset: (stream) =>
      act(
        [
          `Reset ${stream}?`,
          "Its moving averages and the memory of its guards begin again. The audit log records it.",
          "Reset averages",
        ],
        () => api.resetStream(stream),
        `${stream} was reset.`,
      ),
    remove: async (stream) => {
      const gone = await act(
        [
          `Delete ${stream}?`,
          "Its averages and counts are deleted; its lines stay in the audit log. Its next batch begins a new stream.",
          "Delete stream",
        ],
        () => api.deleteStream(stream),
        `${stream} was deleted.`,
      );
      if (gone) onDeleted(stream);
    },
    switchExpert: (expert, on) =>
      act(
        [
          `Switch ${expert} ${on ? "on" : "off"}?`,
          on
            ? "It is used again from the next batch of every stream on."
            : "It is not used from the next batch of every stream on; the other coefficients are renormalised.",
          `Switch ${on ? "on" : "off"}`,
        ],
        () => api.switchExpert(expert, on),
        `${expert} was switched ${on ? "on" : "off"}.`,
      ),
    reload: () =>
      act(
        [
          "Reload the pool?",
          "The experts are read from disk again. If the pool has changed, the averages of all streams begin again.",
          "Reload pool",
        ],
        api.reloadPool,
        "The pool was reloaded.",
      ),
  };
};
