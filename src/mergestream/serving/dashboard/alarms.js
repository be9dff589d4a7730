// What the guard rails say about the last batch of every stream. A new line is read out; a changed number is not.

import { byId, create, keyed, say } from "./dom.js";
import { gravity, icon, wordOf } from "./severity.js";

const build = (onChoose) => ({ stream, severity, code }) =>
  create(
    "li",
    { class: severity },
    create("span", { class: "chip" }, icon(severity), wordOf(severity)),
    create("button", { type: "button", class: "link", onclick: () => onChoose(stream) }, stream),
    create("span", { class: "sentence" }),
    create("code", {}, code),
  );

export const showAlarms = (streams, onChoose) => {
  const all = streams.flatMap(({ name, alarms }) => (alarms ?? []).map((alarm) => ({ ...alarm, stream: name })));
  all.sort((one, other) => gravity(other.severity) - gravity(one.severity));
  const speaking = all.filter(({ severity }) => gravity(severity) > 0);
  keyed(
    byId("alarm-list"),
    speaking,
    ({ stream, code, severity }) => `${stream} ${code} ${severity}`,
    build(onChoose),
    (item, { sentence }) => say(item.querySelector(".sentence"), sentence),
  );
  byId("no-alarms").hidden = speaking.length > 0;
  byId("alarms").classList.toggle("quiet-now", speaking.length === 0);
  return speaking.length;
};
