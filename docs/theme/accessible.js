// What the theme's own script makes of a page, for keyboards and screen readers: tables that scroll can be focused, the
// search has a name, and the bars of buttons at blocks are no landmarks.
const mend = () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) each.tabIndex = 0;
  for (const each of document.querySelectorAll("nav.md-code__nav:not([role])")) each.setAttribute("role", "none");
  document.querySelector(".md-search:not([aria-label])")?.setAttribute("aria-label", "Search");
};
new MutationObserver(mend).observe(document.body, { childList: true, subtree: true });
mend();
