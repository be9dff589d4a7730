// The quantities that are charted, and their series: names in a fixed order, each with its values and its style.
// A style is a colour of colours.css and how often the colours were used before ("c0 round0").

import { milliseconds, nats, share, whole } from "./words.js";

const COLOURS = 8;
const SHOWN_CLASSES = 8;

const styleOf = (kind, place) => `${kind}${place % COLOURS} round${Math.min(2, Math.floor(place / COLOURS))}`;
// The style of an expert, the same everywhere.
export const expertStyle = (experts, name) => styleOf("c", Math.max(0, experts.indexOf(name)));

// Names in the pool first, then those that occur only in earlier steps.
const namesIn = (
  steps,
  field,
  first,
) => [...new Set([...first, ...steps.flatMap((step) => Object.keys(step[field] ?? {}))])];
const valuesOf = (steps, field, name) =>
  steps.map((step) => (Object.hasOwn(step[field] ?? {}, name) ? step[field][name] : null));

const byExpert = (field) => ({ steps, experts }) => {
  const names = namesIn(steps, field, experts);
  return names.map((name) => ({ name, style: expertStyle(names, name), values: valuesOf(steps, field, name) }));
};

const total = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);

const allClasses = ({ steps, classes }) =>
  namesIn(steps, "predictions_per_class", classes)
    .map((name, place) => ({
      name,
      style: styleOf("k", place),
      values: valuesOf(steps, "predictions_per_class", name),
    }));

// The most frequent classes, and the others as one series: more colours cannot be distinguished.
const frequentClasses = (view) => {
  const { steps } = view;
  const all = allClasses(view);
  if (all.length <= SHOWN_CLASSES) return all;
  const frequent = new Set(
    [...all].sort((one, other) => total(other.values) - total(one.values)).slice(0, SHOWN_CLASSES - 1),
  );
  const [shown, others] = [all.filter((each) => frequent.has(each)), all.filter((each) => !frequent.has(each))];
  const sums = steps.map((_, place) => total(others.map((each) => each.values[place])));
  return [...shown.map((each, place) => ({ ...each, style: styleOf("k", place) })), {
    name: `${others.length} other classes`,
    style: styleOf("k", SHOWN_CLASSES - 1),
    values: sums,
  }];
};

export const QUANTITIES = [
  {
    id: "encoder",
    title: "Encoder coefficients",
    unit: "share",
    kind: "areas",
    top: 1,
    format: share,
    about: "How much of each expert's encoder is in the merged model.",
    series: byExpert("encoder_coefficients"),
    one: "the encoder's shares are",
  },
  {
    id: "head",
    title: "Head coefficients",
    unit: "share",
    kind: "areas",
    top: 1,
    format: share,
    about: "How much of each expert's head is in the merged model.",
    series: byExpert("head_coefficients"),
    one: "the head's shares are",
  },
  {
    id: "entropy",
    title: "Entropies",
    unit: "nats",
    kind: "lines",
    format: nats,
    limit: ({ classes }) => Math.log(classes.length),
    limitWords: "log C: guessing",
    about: "How uncertain each expert is about the batch; lower is more certain.",
    series: byExpert("entropies"),
    one: "the experts' entropies in nats are",
  },
  {
    id: "predictions",
    title: "Predictions per class",
    unit: "images",
    kind: "bars",
    format: whole,
    about: "Predictions of the merged model.",
    series: frequentClasses,
    columns: allClasses,
    one: "the answers per class are",
  },
  {
    id: "latency",
    title: "Time per step",
    unit: "milliseconds",
    kind: "lines",
    format: milliseconds,
    about: "From decoded images to the answer in the audit log.",
    series: ({ steps }) => [{ name: "time", style: "accent round0", values: steps.map((step) => step.milliseconds ?? null) }],
    one: "the time in milliseconds is",
  },
];
