"use strict";
// Light, dark or as the system has it; remembered where the browser lets a page remember.
const Theme = (() => {
  const listeners = [];
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("tseeds-theme"); } catch (error) { chosen = null; }
  const current = () => chosen || (system.matches ? "dark" : "light");
  const apply = () => {
    document.documentElement.dataset.theme = current();
    listeners.forEach((tell) => tell(current()));
  };
  system.addEventListener("change", apply);
  apply();
  return {
    current,
    onChange: (tell) => listeners.push(tell),
    toggle: () => {
      chosen = current() === "dark" ? "light" : "dark";
      try { localStorage.setItem("tseeds-theme", chosen); } catch (error) { /* private window */ }
      apply();
    },
  };
})();
