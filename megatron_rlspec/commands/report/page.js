"use strict";
// Hover values: the nearest step's row of the chart under the pointer.
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;
document.body.append(tip);
for (const svg of document.querySelectorAll("svg.chart")) {
  const rows = JSON.parse(svg.parentNode.querySelector("script").textContent).rows || [];
  const cross = svg.querySelector(".cross");
  const hide = () => { tip.hidden = true; cross.style.visibility = "hidden"; };
  svg.addEventListener("pointermove", event => {
    if (!rows.length) return;
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    let best = rows[0];
    for (const row of rows) if (Math.abs(row[0] - x) < Math.abs(best[0] - x)) best = row;
    cross.setAttribute("x1", best[0]);
    cross.setAttribute("x2", best[0]);
    cross.style.visibility = "visible";
    tip.textContent = best.slice(1).join("\n");
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 6);
    const above = event.clientY + 14 + tip.offsetHeight > innerHeight;
    tip.style.left = Math.max(left, 4) + "px";
    tip.style.top = (above ? event.clientY - 10 - tip.offsetHeight : event.clientY + 14) + "px";
  });
  svg.addEventListener("pointerleave", hide);
}
// Filter of the samples by reward. A sample whose reward failed has none, and is shown without a filter only.
const least = document.getElementById("least"), most = document.getElementById("most");
if (least) {
  const rows = [...document.querySelectorAll("tr[data-reward]")];
  const shown = document.getElementById("shown");
  const filter = () => {
    const all = least.value === "" && most.value === "";
    const low = least.value === "" ? -Infinity : Number(least.value);
    const high = most.value === "" ? Infinity : Number(most.value);
    let count = 0;
    for (const row of rows) {
      const reward = row.dataset.reward === "" ? NaN : Number(row.dataset.reward);
      row.hidden = !(all || (reward >= low && reward <= high));
      count += !row.hidden;
    }
    shown.textContent = count + " of " + rows.length + " shown";
  };
  least.addEventListener("input", filter);
  most.addEventListener("input", filter);
  filter();
}
