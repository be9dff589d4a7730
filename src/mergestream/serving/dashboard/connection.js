// Asks the service again and again, and says how that goes: live, paused, lost since when, or what it refuses.

import { Lost, Problem } from "./api.js";
import { byId, say } from "./dom.js";
import { clock } from "./words.js";

const EVERY = 1000; // milliseconds
const HIDDEN = 10_000; // while nobody looks
const LONGEST = 5000; // between tries when there is no answer

export class Connection {
  #timer = null;
  #failures = 0;
  #lostSince = null;
  #isAsking = false;
  #isAskedAgain = false;
  isPaused = false;

  constructor(ask, onProblem) {
    this.ask = ask;
    this.onProblem = onProblem;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.now();
    });
  }

  async now() {
    clearTimeout(this.#timer);
    if (this.#isAsking) {
      this.#isAskedAgain = true;
      return;
    }
    this.#isAsking = true;
    let wait = EVERY;
    try {
      await this.ask();
      this.#answered();
    } catch (error) {
      wait = this.#failed(error);
    } finally {
      this.#isAsking = false;
    }
    if (this.#isAskedAgain) {
      this.#isAskedAgain = false;
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
      this.#show("lost", `Connection lost since ${since}: ${error.message}. What is shown is from before.`);
    } else if (error.status === 401) this.#show("refused", "The service asks for a token.");
    else if (error.status === 429) this.#show("slow", "The service asks this page to slow down.");
    else if (error instanceof Problem) this.#show("lost", `The service refuses since ${since}. ${error.message}`);
    else {
      console.error(error);
      this.#show("lost", `This page cannot show what the service says: ${error.message}`);
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
