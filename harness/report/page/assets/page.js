// What happens when the page opens: the table at once, the rest then.

/** Whether the address is a state, and not the place of a section. */
function asksForState() {
  return location.hash.includes("=");
}

function openGroup(details) {
  const place = details.querySelector(".failure");
  if (!details.open || details.dataset.drawn) return;
  details.dataset.drawn = "yes";
  const row = Number(details.dataset.row);
  place.replaceWith(failure(row), sameWay(row) ?? "");
  reachScrollers();
}

for (const details of document.querySelectorAll("details.group")) {
  details.addEventListener("toggle", () => openGroup(details));
  openGroup(details);
}

/** Open the group of failures that the address names. */
function openNamedGroup() {
  const details = document.getElementById(location.hash.slice(1));
  if (!details?.matches(".group")) return;
  details.open = true;
  details.scrollIntoView();
}

addEventListener("hashchange", () => {
  if (!asksForState()) {
    openNamedGroup();
    return;
  }
  read();
  show();
  if (!state.case) document.getElementById("cases").scrollIntoView();
});

read();
show();
openNamedGroup();
document.documentElement.dataset.loaded = Math.round(performance.now());

// What lies below is made as soon as nothing else is to do.
requestIdleCallback(
  () => {
    drawHeatMap();
    drawPlots();
    drawTimes();
    document.documentElement.dataset.drawn = Math.round(performance.now());
    if (state.case) return;
    const place = asksForState() ? "cases" : location.hash.slice(1);
    if (place) document.getElementById(place)?.scrollIntoView(); // the browser was there when there was less above
  },
  { timeout: 1000 },
);
