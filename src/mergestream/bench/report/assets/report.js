"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Theme: what the reader chose before, else what the system prefers. A page opened from disk may have no storage.
  const stored = { get() { try { return localStorage.getItem("mergestream-theme"); } catch { return null; } },
                   set(name) { try { localStorage.setItem("mergestream-theme", name); } catch { /* for this visit only */ } } };
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const theme = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const showTheme = () => {
    theme.setAttribute("aria-pressed", String(isDark()));
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Dark colours, now ${isDark() ? "on" : "off"}. Change to ${theme.textContent}`);
  };
  if (stored.get()) root.dataset.theme = stored.get();
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored.set(root.dataset.theme);
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  showTheme();

  // Sorting: by the number a cell begins with, else by its text; cells without a value stay last. A third click restores.
  const valueOf = (row, column) => row.cells[column].textContent.trim();
  const numberOf = (text) => {
    const found = text.replace(/−/g, "-").replace(/,(?=\d{3})/g, "").match(/^[+-]?\d+(\.\d+)?(e[+-]?\d+)?/i);
    return found ? Number(found[0]) : null;
  };
  const compare = (one, other, sign) => {
    const [a, b] = [numberOf(one), numberOf(other)];
    if (a !== null && b !== null) return sign * (a - b);
    if (a !== null || b !== null) return a === null ? 1 : -1;
    return sign * one.localeCompare(other, undefined, { numeric: true });
  };
  const sortBy = (table, column, heading) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    rows.forEach((row, place) => { row.dataset.place ??= String(place); });
    const isNumeric = rows.some((row) => column > 0 && numberOf(valueOf(row, column)) !== null);
    const orders = isNumeric ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
    const order = orders[(orders.indexOf(heading.getAttribute("aria-sort")) + 1) % 3];
    all("thead th", table).forEach((each) => each.setAttribute("aria-sort", "none"));
    heading.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => (order === "none" ? a.dataset.place - b.dataset.place
      : compare(valueOf(a, column), valueOf(b, column), sign) || a.dataset.place - b.dataset.place));
    body.append(...rows);
  };
  all("table.sortable").forEach((table) => all("thead th", table).forEach((heading, column) =>
    heading.querySelector("button").addEventListener("click", () => sortBy(table, column, heading))));

  // Methods: one checkbox hides a method's rows, lines, labels and legend entries everywhere.
  const boxes = all("#methods input");
  const showMethods = () => {
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
    all("[data-method]").forEach((each) => each.classList.toggle("off", hidden.has(each.dataset.method)));
    const shown = boxes.length - hidden.size;
    document.getElementById("shown").textContent =
      shown === boxes.length ? `all ${shown} shown` : `${shown} of ${boxes.length} shown`;
  };
  const choices = { all: () => true, none: () => false, plain: (name) => !name.includes("(") };
  all("[data-choose]").forEach((button) => button.addEventListener("click", () => {
    boxes.forEach((box) => { box.checked = choices[button.dataset.choose](box.value); });
    showMethods();
  }));
  boxes.forEach((box) => box.addEventListener("change", showMethods));
  if (boxes.length) showMethods();

  // Variants of a method are folded, except where they are the subject.
  all("table").filter((table) => !table.closest("#ablation")).forEach((table) => {
    const variants = all("tr.variant", table);
    if (!variants.length || variants.length === table.tBodies[0].rows.length) return;
    const button = document.createElement("button");
    const show = (folded) => {
      table.classList.toggle("folded", folded);
      button.textContent = `${folded ? "Show" : "Hide"} ${variants.length} variant${variants.length > 1 ? "s" : ""}`;
      button.setAttribute("aria-expanded", String(!folded));
    };
    button.type = "button";
    button.className = "unfold";
    button.addEventListener("click", () => show(!table.classList.contains("folded")));
    table.closest(".scroll").after(button);
    show(true);
  });

  // A table wider than its box says so, and the keyboard reaches it.
  const hintWide = () => all(".scroll").forEach((box) => {
    const isWide = box.scrollWidth > box.clientWidth + 1;
    box.classList.toggle("wide", isWide);
    if (isWide) box.tabIndex = 0; else box.removeAttribute("tabindex");
    const hint = box.parentElement.querySelector(".hint");
    if (hint) hint.hidden = !isWide;
  });
  all("details").forEach((each) => each.addEventListener("toggle", hintWide));
  addEventListener("resize", hintWide);
  hintWide();

  all(".copy").forEach((button) => button.addEventListener("click", async () => {
    const source = button.nextElementSibling;
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Selected: press Ctrl+C";
    }
  }));

  // On paper all folds are open.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = all("details.fold:not([open])");
    folded.forEach((each) => { each.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((each) => { each.open = false; }));
  document.getElementById("print").addEventListener("click", () => print());
})();
