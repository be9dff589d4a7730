// Steps of the streams that were shown, as far as the service remembers them.

export const MOST = 200;

export class History {
  #streams = new Map();
  #qualities = new Map(); // the newest estimates

  steps(stream) {
    return this.#streams.get(stream) ?? [];
  }

  quality(stream) {
    return this.#qualities.get(stream) ?? null;
  }

  setQuality(stream, quality) {
    this.#qualities.set(stream, quality);
  }

  last(stream) {
    return this.steps(stream).at(-1)?.step ?? null;
  }

  // A step is identified by its number.
  add(stream, steps) {
    const byNumber = new Map(this.steps(stream).map((step) => [step.step, step]));
    steps.forEach((step) => byNumber.set(step.step, step));
    const sorted = [...byNumber.values()].sort((one, other) => one.step - other.step);
    this.#streams.set(stream, sorted.slice(-MOST));
  }

  forget(stream) {
    this.#streams.delete(stream);
    this.#qualities.delete(stream);
  }

  clear() {
    this.#streams.clear();
    this.#qualities.clear();
  }

  // A stream with fewer steps than before was deleted and begun again.
  compare(streams) {
    const counts = new Map(streams.map((each) => [each.name, each.steps]));
    for (const name of [...this.#streams.keys()]) {
      const last = this.last(name);
      if (!counts.has(name) || (last !== null && counts.get(name) <= last - 1)) this.forget(name);
    }
  }
}
