// Asks the service again and again, and holds the state: connecting, live, paused, lost, slow, or signed out.

import { hasToken, Lost, Problem } from "./api.js";
import { byId, say } from "./dom.js";
import { clock } from "./words.js";

const EVERY = 1000; // milliseconds
const HIDDEN = 10_000; // while the tab is hidden
const LONGEST = 5000; // between tries without an answer

export class Connection {
  #timer = null;
  #failures = 0;
  #lostSince = null;
  #isUpdating = false;
  #isRepeatDue = false;
  isPaused = false;
  state = "connecting";
  lastUpdate = null; // when the service last answered

  // update: gets the data, false if they came too late to be used; onChange: shows them, with the error if there is one
  constructor(update, onChange) {
    this.update = update;
    this.onChange = onChange;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.now();
    });
  }

  async now() {
    clearTimeout(this.#timer);
    if (this.#isUpdating) {
      this.#isRepeatDue = true;
      return;
    }
    this.#isUpdating = true;
    let wait = EVERY;
    try {
      if ((await this.update()) !== false) this.#answered();
    } catch (error) {
      wait = this.#failed(error);
    } finally {
      this.#isUpdating = false;
    }
    const isRepeat = this.#isRepeatDue;
    this.#isRepeatDue = false;
    if (isRepeat) this.now();
    else if (!this.isPaused) this.#timer = setTimeout(() => this.now(), document.hidden ? Math.max(wait, HIDDEN) : wait);
  }

  // The data shown so far are not this reader's any more: another token is in use.
  restart() {
    this.lastUpdate = null;
    this.#show("connecting", "Connecting…");
    this.now();
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    if (isPaused) {
      clearTimeout(this.#timer);
      this.#show("paused", `Paused at ${clock(new Date())}`);
      this.onChange(null);
    } else this.now();
  }

  #answered() {
    this.#failures = 0;
    this.#lostSince = null;
    this.lastUpdate = new Date();
    if (this.isPaused) this.#show("paused", `Paused at ${clock(this.lastUpdate)}`);
    else this.#show("live", "Live");
    this.onChange(null);
  }

  #failed(error) {
    this.#failures += 1;
    this.#lostSince ??= new Date();
    const since = clock(this.#lostSince);
    if (error instanceof Lost) this.#show("lost", `Connection lost since ${since}: ${error.message}.`);
    else if (error.status === 401) {
      this.#show("signed-out", hasToken() ? "Not signed in: the token was refused." : "Not signed in.");
    } else if (error.status === 429) this.#show("slow", "The service asks this page to slow down.");
    else if (error instanceof Problem) this.#show("lost", `The service has refused since ${since}. ${error.message}`);
    else {
      console.error(error);
      this.#show("lost", `This page cannot show the data of the service: ${error.message}`);
    }
    this.onChange(error);
    const longer = Math.min(LONGEST, EVERY * this.#failures);
    return error.retryAfter ? Math.max(longer, error.retryAfter * 1000) : longer;
  }

  #show(state, words) {
    this.state = state;
    byId("state").dataset.state = state;
    say(byId("state-text"), words);
  }
}
