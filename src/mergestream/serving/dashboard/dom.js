// Builds elements with text nodes only: text from the service is never read as markup.

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

// Writes only changes, so that selection, focus and screen readers keep their place.
export const say = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

// Gives an element new children if the value that they show is another one than the last time.
export const redraw = (element, value, children) => {
  const drawn = JSON.stringify(value ?? null);
  if (element.dataset.drawn === drawn) return;
  element.dataset.drawn = drawn;
  element.replaceChildren(...children());
};

// Gives `parent` one child per key, in this order, and reuses existing ones.
export const keyed = (parent, items, keyOf, build, update) => {
  const existing = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, place) => {
    const key = keyOf(item);
    const element = existing.get(key) ?? build(item);
    element.dataset.key = key;
    existing.delete(key);
    if (parent.children[place] !== element) parent.insertBefore(element, parent.children[place] ?? null);
    update(element, item);
  });
  existing.forEach((left) => left.remove());
};
