// The page: asks the service every second and shows all streams, one of them in detail.

import { createActions, showError } from "./actions.js";
import { showAlarms } from "./alarms.js";
import * as api from "./api.js";
import { Connection } from "./connection.js";
import { byId, create, keyed, say } from "./dom.js";
import { firstBatch } from "./firstbatch.js";
import { History } from "./history.js";
import { Panel } from "./panel.js";
import { showPool } from "./pool.js";
import { showSystems } from "./systems.js";
import { Tabs } from "./tabs.js";
import { startTheme } from "./theme.js";
import { startToken } from "./token.js";
import { clock, milliseconds, whole } from "./words.js";

const history = new History();
let overview = null; // null: nothing is known, and nothing is shown
let reader = 0; // raised with every change of the token: answers for the one before are not shown
let isSignedOut = false;
let mayAdminister = true; // until the service refuses this token
let selected = inAddress(); // the name of the stream that is shown in detail

const actions = createActions({
  onDone: () => connection.now(),
  onRefused: (error) => {
    mayAdminister = false;
    token.open(error.message);
  },
  onDeleted: (stream) => history.forget(stream),
});
const panel = new Panel(actions);
const tabs = new Tabs((name) => select(name));
const connection = new Connection(update, (problem) => {
  const isUnexpected = problem && !(problem instanceof api.Lost || problem instanceof api.Problem);
  if (connection.state === "signed-out" || isUnexpected) forget();
  if (connection.state === "signed-out") token.open(problem.message);
  else if (isSignedOut) token.close();
  isSignedOut = connection.state === "signed-out";
  show();
});
const token = startToken(() => {
  mayAdminister = true;
  forget();
  connection.restart();
  show();
});

// Data of another reader, or that this page cannot show, are removed.
function forget() {
  reader += 1;
  overview = null;
  history.clear();
  byId("person").value = "";
}

function inAddress() {
  return new URLSearchParams(location.hash.slice(1)).get("stream");
}

// A stream that was shown by default stays, even if another one comes before it in the list later.
function selectedStream() {
  const stream = overview.streams.find(({ name }) => name === selected) ?? overview.streams[0] ?? null;
  selected = stream?.name ?? selected;
  return stream;
}

function select(name) {
  selected = name;
  window.history.replaceState(null, "", `#${new URLSearchParams({ stream: name })}`);
  show();
  connection.now();
}

async function update() {
  const asker = reader;
  const latest = await api.overview();
  if (asker !== reader) return false;
  overview = latest;
  history.compare(overview.streams);
  const stream = selectedStream()?.name;
  if (stream !== undefined) await updateSteps(stream);
  return asker === reader;
}

async function updateSteps(stream) {
  try {
    const asker = reader;
    const { steps, quality } = await api.recent(stream, history.last(stream));
    if (asker !== reader) return;
    if (steps.length) history.add(stream, steps);
    history.setQuality(stream, quality ?? null);
  } catch (error) {
    if (error.status !== 404) throw error; // deleted in between
  }
}

function show() {
  byId("content").hidden = overview === null;
  byId("no-data").hidden = overview !== null;
  if (!overview) {
    showNoData();
    return;
  }
  const { streams, pool } = overview;
  const experts = pool.experts.map(({ name }) => name);
  const stream = selectedStream();
  const asOf = connection.state === "live" ? null : connection.lastUpdate;
  byId("content").classList.toggle("stale", asOf !== null);
  byId("stale").hidden = asOf === null;
  if (asOf) say(byId("stale"), `Not current. Last update: ${clock(asOf)}.`);
  showNumbers();
  const alarms = showAlarms(streams, asOf, select, actions);
  document.title = `${asOf ? "(not current) " : alarms ? `(${alarms}) ` : ""}mergestream`;
  tabs.show(streams, stream?.name ?? null, experts);
  showPool(pool, actions);
  showSystems(overview);
  const content = stream ? panel.element : firstBatch();
  if (byId("panel").firstElementChild !== content) byId("panel").replaceChildren(content);
  if (stream) showStream(stream, experts);
  showAdministration();
}

const NO_DATA = {
  "signed-out": ["Not signed in", "Alarms, streams and the pool are shown after sign-in with an access token."],
  connecting: ["Connecting", "The service has not answered yet. Whether there are alarms is unknown."],
};
const NO_ANSWER = ["No data", "The service has not answered this page. Whether there are alarms is unknown."];

function showNoData() {
  const [title, text] = NO_DATA[connection.state] ?? NO_ANSWER;
  document.title = `(${title.toLowerCase()}) mergestream`;
  say(byId("no-data-title"), title);
  say(byId("no-data-text"), text);
  byId("panel").replaceChildren();
}

function showStream(stream, experts) {
  panel.element.setAttribute("aria-label", `Stream ${stream.name}`);
  panel.show(stream, history.steps(stream.name), experts, overview.pool.classes);
  panel.quality.show(history.quality(stream.name));
}

function showNumbers() {
  const { requests = {}, latency_ms: latency, streams, version } = overview;
  const images = streams.reduce((sum, each) => sum + (each.images ?? 0), 0);
  const tiles = [
    ["Streams", whole(streams.length), ""],
    ["Images", whole(images), ""],
    ["Answered", whole(requests.answered), "requests"],
    ["Refused", whole(requests.refused), "requests"],
    ["Failed", whole(requests.failed), "requests"],
    ["Latency p50", milliseconds(latency?.p50), "ms"],
    ["p95", milliseconds(latency?.p95), "ms"],
    ["p99", milliseconds(latency?.p99), "ms"],
  ];
  keyed(
    byId("numbers"),
    tiles,
    ([name]) => name,
    ([name, , unit]) =>
      create("p", { class: "tile" }, create("span", {}, name), create("b"), create("small", {}, unit)),
    (tile, [, value]) => say(tile.querySelector("b"), value),
  );
  say(byId("version"), version ? `mergestream ${version}.` : "");
}

function showAdministration() {
  const may = overview.administrator ?? mayAdminister;
  document.querySelectorAll("[data-administrator]").forEach((each) => {
    each.hidden = !may;
  });
}

startTheme(byId("theme"), () => panel.redraw());
byId("reload").addEventListener("click", actions.reload);
byId("pause").addEventListener("click", () => {
  connection.pause(!connection.isPaused);
  byId("pause").setAttribute("aria-pressed", String(connection.isPaused));
});
addEventListener("hashchange", () => {
  if (inAddress()) select(inAddress());
});
addEventListener("unhandledrejection", (event) => showError("Error in this page.", event.reason));
connection.now();
