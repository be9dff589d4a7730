// The field for the token; it opens by itself when the service asks for one.

import { hasToken, setToken } from "./api.js";
import { byId, say } from "./dom.js";

export const startToken = (onChange) => {
  const [form, field, button, forget] = ["token-form", "token", "token-open", "token-forget"].map(byId);
  const show = (isOpen) => {
    form.hidden = !isOpen;
    button.setAttribute("aria-expanded", String(isOpen));
    forget.hidden = !hasToken();
  };
  const use = (value) => {
    setToken(value);
    field.value = "";
    show(false);
    onChange();
  };
  button.addEventListener("click", () => {
    show(form.hidden);
    if (!form.hidden) field.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    use(field.value.trim());
  });
  forget.addEventListener("click", () => use(""));
  show(false);
  return {
    close: () => show(false),
    // If it is open already, the focus stays where it is.
    open: (why) => {
      say(
        byId("token-why"),
        `${why} The token is sent with every request of this page and kept until this tab is closed.`,
      );
      if (form.hidden) {
        show(true);
        field.focus();
      }
    },
  };
};
