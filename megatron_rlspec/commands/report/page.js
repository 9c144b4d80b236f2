"use strict";
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
