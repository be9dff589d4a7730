// What an administrator may do here: asked once more, done, and told; what the service refuses is shown in its words.

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

export const tellError = (what, error) => {
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

// onDone: look again; onRefused: the token is not good for it.
export const createActions = ({ onDone, onRefused, onDeleted }) => {
  const act = async (question, call, done) => {
    if (!(await confirmed(...question))) return false;
    try {
      await call();
      byId("messages").replaceChildren();
      say(byId("said"), done);
      return true;
    } catch (error) {
      tellError(`${question[2]}: not done.`, error);
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
          "Its moving averages and what its guard rails remember begin again. The audit log says so.",
          "Reset averages",
        ],
        () => api.resetStream(stream),
        `${stream} was reset.`,
      ),
    remove: async (stream) => {
      const gone = await act(
        [
          `Delete ${stream}?`,
          "Its averages and counts go; its lines stay in the audit log. Its next batch begins a new stream.",
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
            ? "It takes part again from every stream's next batch on."
            : "Every stream's next batch is answered without it; the other coefficients are renormalised.",
          `Switch ${on ? "on" : "off"}`,
        ],
        () => api.switchExpert(expert, on),
        `${expert} was switched ${on ? "on" : "off"}.`,
      ),
    reload: () =>
      act(
        [
          "Reload the pool?",
          "The experts are read from disk again. If any weight has changed, every stream's averages begin again.",
          "Reload pool",
        ],
        api.reloadPool,
        "The pool was reloaded.",
      ),
  };
};
