// Actions of administrators: confirmed first, then done and announced. Problems are shown in the service's words.

import * as api from "./api.js";
import { byId, create, say } from "./dom.js";
import { listed } from "./words.js";

// What the person entered, or null if they cancelled. Only some questions ask for a name.
const confirmed = ({ title, text, yes, asksName = false }) =>
  new Promise((resolve) => {
    const [dialog, name, note] = ["confirm", "person", "note"].map(byId);
    say(byId("confirm-title"), title);
    say(byId("confirm-text"), text);
    say(byId("confirm-yes"), yes);
    byId("confirm-person").hidden = !asksName;
    name.disabled = note.disabled = !asksName;
    note.value = "";
    dialog.returnValue = "no";
    const answer = () => resolve(dialog.returnValue === "yes" ? { name: name.value.trim(), note: note.value.trim() } : null);
    dialog.addEventListener("close", answer, { once: true });
    dialog.showModal();
    if (asksName) name.focus();
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

// What is asked before each action, what is called then, and what is announced when it is done.
const ACTIONS = {
  // codes: the alarms of the stream that are not acknowledged
  acknowledge: (stream, codes) => ({
    title: `Acknowledge ${codes.length === 1 ? "the alarm" : `all ${codes.length} alarms`} of ${stream}?`,
    text: `${listed(codes)}. Your name, the time and the note are written to the audit log. ` +
      "An alarm stays until its finding ends.",
    yes: "Acknowledge",
    asksName: true,
    call: (person) => api.acknowledge(stream, person),
    done: `The alarms of ${stream} were acknowledged.`,
  }),
  reset: (stream) => ({
    title: `Reset ${stream}?`,
    text: "Its moving averages and the memory of its guards begin again. The audit log records it.",
    yes: "Reset averages",
    call: () => api.resetStream(stream),
    done: `${stream} was reset.`,
  }),
  remove: (stream) => ({
    title: `Delete ${stream}?`,
    text: "Its averages and counts are deleted; its lines stay in the audit log. Its next batch begins a new stream.",
    yes: "Delete stream",
    call: () => api.deleteStream(stream),
    done: `${stream} was deleted.`,
  }),
  switchExpert: (expert, on) => ({
    title: `Switch ${expert} ${on ? "on" : "off"}?`,
    text: on
      ? "It is used again from the next batch of every stream on."
      : "It is not used from the next batch of every stream on; the other coefficients are renormalised.",
    yes: `Switch ${on ? "on" : "off"}`,
    call: () => api.switchExpert(expert, on),
    done: `${expert} was switched ${on ? "on" : "off"}.`,
  }),
  reload: () => ({
    title: "Reload the pool?",
    text: "The experts are read from disk again. If the pool has changed, the averages of all streams begin again.",
    yes: "Reload pool",
    call: api.reloadPool,
    done: "The pool was reloaded.",
  }),
};

// onDone: update the page; onRefused: the token does not allow it.
export const createActions = ({ onDone, onRefused, onDeleted }) => {
  byId("confirm-no").addEventListener("click", () => byId("confirm").close("no"));
  const act = (describe) => async (...given) => {
    const { call, done, ...question } = describe(...given);
    const person = await confirmed(question);
    if (!person) return false;
    try {
      await call(person);
      byId("messages").replaceChildren();
      say(byId("announcement"), done);
      return true;
    } catch (error) {
      showError(`${question.yes} failed.`, error);
      if (error.status === 401 || error.status === 403) onRefused(error);
      return false;
    } finally {
      onDone();
    }
  };
  const actions = Object.fromEntries(Object.entries(ACTIONS).map(([name, describe]) => [name, act(describe)]));
  const remove = async (stream) => {
    if (await actions.remove(stream)) onDeleted(stream);
  };
  return { ...actions, remove };
};
