// Numbers and times as text.

export const NONE = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const fixed = (digits) => (value) => (isNumber(value) ? value.toFixed(digits) : NONE);
export const share = fixed(2);
export const nats = fixed(3);
export const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en") : NONE);
export const milliseconds = (value) => (isNumber(value) ? value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0) : NONE);
export const plural = (count, word, more = `${word}s`) => `${whole(count)} ${count === 1 ? word : more}`;

// The service writes seconds since 1970 or ISO 8601.
export const dateOf = (time) => {
  if (time === null || time === undefined) return null;
  const date = new Date(isNumber(time) ? time * 1000 : time);
  return Number.isNaN(date.getTime()) ? null : date;
};

export const clock = (time) => {
  const date = time instanceof Date ? time : dateOf(time);
  return date ? date.toLocaleTimeString("en-GB") : NONE;
};

// With the date, unless it is today's.
export const moment = (time, now = new Date()) => {
  const date = dateOf(time);
  if (!date || date.toDateString() === now.toDateString()) return clock(date);
  return `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short", year: "numeric" })}, ${clock(date)}`;
};

export const ago = (time, now = Date.now()) => {
  const date = dateOf(time);
  if (!date) return "time unknown since the restart";
  const seconds = Math.max(0, (now - date.getTime()) / 1000);
  if (seconds < 2) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86400)} d ago`;
};

export const listed = (words) =>
  words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
