"use strict";
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const points = JSON.parse(svg.dataset.hover);
  const tip = svg.parentElement.querySelector(".tip");
  const pointer = svg.querySelector(".pointer");
  const title = svg.querySelector("title");
  let shown = -1;
  // Browsers would show the title as a tooltip of their own, over ours.
  svg.setAttribute("aria-label", title.textContent);
  svg.setAttribute("aria-describedby", svg.querySelector("desc").id);
  svg.removeAttribute("aria-labelledby");
  title.remove();

  const hide = () => {
    shown = -1;
    tip.hidden = true;
    pointer.style.visibility = "hidden";
  };
  const line = (text, colour) => {
    const element = document.createElement("div");
    element.textContent = text;
    if (colour !== null) element.className = "s" + colour;
    return element;
  };
  const show = (index) => {
    if (!points.length) return;
    shown = Math.max(0, Math.min(points.length - 1, index));
    const [x, heading, values] = points[shown];
    pointer.setAttribute("x1", x);
    pointer.setAttribute("x2", x);
    pointer.style.visibility = "visible";
    tip.replaceChildren(line(heading, null), ...values.map(([, colour, text]) => line(text, colour)));
    tip.hidden = false;
    const box = svg.getBoundingClientRect();
    const figure = svg.parentElement.getBoundingClientRect();
    const place = box.left - figure.left + x * box.width / svg.viewBox.baseVal.width;
    const side = place > figure.width / 2 ? place - tip.offsetWidth - 10 : place + 10;
    tip.style.left = Math.max(0, Math.min(figure.width - tip.offsetWidth, side)) + "px";
    tip.style.top = box.top - figure.top + 12 + "px";
  };
  const nearest = (x) => points.reduce((best, point, index) =>
    Math.abs(point[0] - x) < Math.abs(points[best][0] - x) ? index : best, 0);

  const follow = (event) => {
    const box = svg.getBoundingClientRect();
    show(nearest((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width));
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") hide(); // a lifted finger leaves too, but its owner still reads
  });
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      show(shown + move);
      event.preventDefault();
    } else if (event.key === "Escape") {
      hide();
    }
  });
}
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
