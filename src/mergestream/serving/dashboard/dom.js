// Elements made of text nodes only: whatever the service sends is shown as it is spelt, never read as markup.

const SVG = "http://www.w3.org/2000/svg";

const filled = (element, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
};

export const create = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const shape = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

// Only what has changed is written, so that a selection, a focus and a screen reader stay where they are.
export const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// The children of `parent` become one element per key, in this order; an element that is there already is kept.
export const keyed = (parent, items, keyOf, build, update) => {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const key = keyOf(item);
    const element = there.get(key) ?? build(item);
    element.dataset.key = key;
    there.delete(key);
    if (parent.children[place] !== element) parent.insertBefore(element, parent.children[place] ?? null);
    update(element, item);
  });
  there.forEach((left) => left.remove());
};
