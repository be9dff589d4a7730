// Asks the service again and again, and shows the state: live, paused, lost, or refused.

import { Lost, Problem } from "./api.js";
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

  constructor(update, onProblem) {
    this.update = update;
    this.onProblem = onProblem;
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
      await this.update();
      this.#answered();
    } catch (error) {
      wait = this.#failed(error);
    } finally {
      this.#isUpdating = false;
    }
    if (this.#isRepeatDue) {
      this.#isRepeatDue = false;
      wait = 0;
    }
    if (!this.isPaused) this.#timer = setTimeout(() => this.now(), document.hidden ? Math.max(wait, HIDDEN) : wait);
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    if (isPaused) {
      clearTimeout(this.#timer);
      this.#show("paused", `Paused at ${clock(new Date())}`);
    } else this.now();
  }

  #answered() {
    this.#failures = 0;
    this.#lostSince = null;
    if (!this.isPaused) this.#show("live", "Live");
  }

  #failed(error) {
    this.#failures += 1;
    this.#lostSince ??= new Date();
    const since = clock(this.#lostSince);
    if (error instanceof Lost) {
      this.#show("lost", `Connection lost since ${since}: ${error.message}. The data shown are older.`);
    } else if (error.status === 401) this.#show("refused", "The service asks for a token.");
    else if (error.status === 429) this.#show("slow", "The service asks this page to slow down.");
    else if (error instanceof Problem) this.#show("lost", `The service has refused since ${since}. ${error.message}`);
    else {
      console.error(error);
      this.#show("lost", `This page cannot show the data of the service: ${error.message}`);
    }
    this.onProblem(error);
    const longer = Math.min(LONGEST, EVERY * this.#failures);
    return error.retryAfter ? Math.max(longer, error.retryAfter * 1000) : longer;
  }

  #show(state, words) {
    byId("state").dataset.state = state;
    say(byId("state-text"), words);
  }
}
