// Light or dark: before the page is drawn, so that it does not flash. Not a module, to run first.
(function () {
  const kept = (() => {
    try {
      return localStorage.getItem("miles.theme");
    } catch {
      return null; // storage is forbidden: what the system says
    }
  })();
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
