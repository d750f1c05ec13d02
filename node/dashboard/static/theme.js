// The theme is set before anything is painted: what the viewer chose here, else what the system prefers.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("shoal-theme");
  } catch {
    // Storage may be forbidden; the system's preference is as good.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
