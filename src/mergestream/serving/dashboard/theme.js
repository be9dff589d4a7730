// Light or dark: the reader's choice, otherwise the system's. The report uses the same choice.

const KEY = "mergestream-theme";
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

export const startTheme = (button, onChange) => {
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
  };
  try {
    root.dataset.theme = localStorage.getItem(KEY) ?? "";
  } catch { /* no storage: the system's */ }
  if (!root.dataset.theme) delete root.dataset.theme;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch { /* for this visit only */ }
    show();
    onChange();
  });
  prefersDark.addEventListener("change", () => {
    show();
    onChange();
  });
  show();
};
