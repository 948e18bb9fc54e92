// Make code and tables that are wider than the page scrollable by keyboard.
function findScrolled() {
  for (const element of document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap")) {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  }
}
addEventListener("load", findScrolled);
addEventListener("resize", findScrolled);
