// Alarms of the last batch of every stream: since when, what to do, who has acknowledged them. What is not known is
// shown as unknown, never as none. A screen reader reads new lines, not changed numbers.

import { byId, create, keyed, redraw, say } from "./dom.js";
import { chip, gravity, UNKNOWN } from "./severity.js";
import { clock, moment } from "./words.js";

const UNKNOWN_WORDS = "Unknown since the service was restarted. Known again after the next batch of this stream.";

// Alarms that nobody has acknowledged come first, then streams whose alarms are unknown.
const urgency = ({ severity, acknowledged_by: by }) => gravity(severity) + (severity === UNKNOWN || by ? 0 : 10);

const entriesOf = ({ name, alarms }) => {
  if (!Array.isArray(alarms)) return [{ stream: name, severity: UNKNOWN, code: "", sentence: UNKNOWN_WORDS }];
  const raised = alarms.filter(({ severity }) => gravity(severity) > 0);
  const open = raised.filter((each) => !each.acknowledged_by).map(({ code }) => code);
  return raised.map((alarm) => ({ ...alarm, stream: name, open }));
};

const build = (onSelect) => ({ stream, severity, code }) =>
  create(
    "li",
    { class: severity },
    chip(severity),
    create("button", { type: "button", class: "link", onclick: () => onSelect(stream) }, stream),
    create("span", { class: "sentence" }),
    code ? create("code", {}, code) : null,
    severity === UNKNOWN ? null : create("p", { class: "next" }),
    severity === UNKNOWN ? null : create("p", { class: "acknowledgement" }),
  );

const update = (actions) => (item, alarm) => {
  say(item.querySelector(".sentence"), alarm.sentence);
  if (alarm.severity === UNKNOWN) return;
  const since = alarm.since ? `Since ${moment(alarm.since)}, step ${alarm.step}. ` : "";
  say(item.querySelector(".next"), since + (alarm.next ? `What to do: ${alarm.next}` : ""));
  const shown = [alarm.acknowledged_by, alarm.acknowledged_at, alarm.open];
  redraw(item.querySelector(".acknowledgement"), shown, () => acknowledgement(alarm, actions));
};

const acknowledgement = ({ stream, open, acknowledged_by: by, acknowledged_at: at }, actions) => {
  if (by) return [`Acknowledged by ${by}, ${moment(at)}.`];
  const button = create(
    "button",
    { type: "button", class: "small", "data-administrator": true, hidden: true },
    "Acknowledge",
    create("span", { class: "hidden" }, ` the alarms of ${stream}`),
  );
  button.addEventListener("click", () => actions.acknowledge(stream, open));
  return ["Not acknowledged. ", button];
};

const noneWords = (streams, asOf) => {
  if (asOf) return `None at the last update, ${clock(asOf)}. What happened since then is unknown.`;
  return streams.length ? "None on the last batch of any stream." : "No stream has sent a batch yet.";
};

// asOf: when the data came, if they are not current. Returns how many alarms there are.
export const showAlarms = (streams, asOf, onSelect, actions) => {
  const entries = streams.flatMap(entriesOf).sort((one, other) => urgency(other) - urgency(one));
  keyed(
    byId("alarm-list"),
    entries,
    ({ stream, code, severity, since }) => [stream, code, severity, since ?? ""].join(" "),
    build(onSelect),
    update(actions),
  );
  say(byId("alarms-as-of"), asOf && entries.length ? `as of ${clock(asOf)}, not current` : "");
  say(byId("no-alarms"), entries.length ? "" : noneWords(streams, asOf));
  byId("alarms").classList.toggle("quiet-now", entries.length === 0);
  return entries.filter(({ severity }) => severity !== UNKNOWN).length;
};
