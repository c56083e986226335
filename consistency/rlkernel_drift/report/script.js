"use strict";
// Theme, copy button, and readings under pointer and keys. Words and tables of the page do not need it.
(() => {
  const root = document.documentElement;
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  const data = JSON.parse(document.getElementById("data").textContent);
  root.classList.add("scripted");

  // ---- theme ----
  const themes = ["system", "light", "dark"];
  const theme = document.getElementById("theme");
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "system") + 1) % 3];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    theme.textContent = "Theme: " + next;
  });

  // ---- the section in view ----
  const links = all(".side nav a");
  const seen = new Set();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
    const here = links.find((link) => seen.has(link.hash.slice(1)));
    for (const link of links) link === here ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
  }, { rootMargin: "-10% 0px -55% 0px" });
  for (const link of links) observer.observe(document.getElementById(link.hash.slice(1)));

  // ---- copy ----
  for (const button of all("[data-copy]")) {
    const source = document.getElementById(button.dataset.copy);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }

  // ---- readings: the mark under the pointer, or chosen with arrow keys ----
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  // Home, End, left and right; other keys stay with the browser
  const walk = (key, place, count, put) => {
    if (key === "Home") return put(0);
    if (key === "End") return put(count - 1);
    return key in steps && steps[key][0] ? put(clamp(place + steps[key][0], 0, count - 1)) : "";
  };

  function reader(figure, show, move, hide) {
    const plot = figure.querySelector(".plot");
    const output = figure.querySelector(".read");
    const hint = output.textContent;
    const display = (text) => {
      output.textContent = text || hint;
      output.classList.toggle("live", Boolean(text));
    };
    plot.addEventListener("pointermove", (event) => { const text = show(event); if (text) display(text); });
    plot.addEventListener("pointerleave", () => { hide(); display(""); });
    plot.addEventListener("blur", () => { hide(); display(""); });
    plot.addEventListener("keydown", (event) => {
      const text = event.key === "Escape" ? (hide(), " ") : move(event.key);
      if (text) { event.preventDefault(); display(text.trim()); }
    });
  }

  // bars and operators: transparent rectangles with their reading in data-t
  for (const figure of all(".chart:not(.heat):not(.scatter)")) {
    const marks = all("[data-t]", figure);
    let place = -1;
    const put = (next) => {
      if (marks[place]) marks[place].classList.remove("on");
      place = next;
      if (!marks[place]) return "";
      marks[place].classList.add("on");
      return marks[place].dataset.t;
    };
    const show = (event) => {
      const mark = event.target.closest("[data-t]");
      return mark ? put(marks.indexOf(mark)) : "";
    };
    reader(figure, show, (key) => walk(key, place, marks.length, put), () => put(-1));
  }

  const local = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());

  for (const figure of all(".chart.heat")) {
    const svg = figure.querySelector("svg");
    const cursor = svg.querySelector(".cursor");
    const { box: [left, top, width, height], names, tokens, cells } = data.heat;
    const rows = cells.length, columns = cells[0].length;
    let at = null;
    const put = (row, column) => {
      at = [row, column];
      cursor.removeAttribute("hidden");
      cursor.setAttribute("x", left + column * width / columns);
      cursor.setAttribute("y", top + row * height / rows);
      const cell = cells[row][column];
      const value = cell === null ? "no difference" : "relative error " + (10 ** (cell / 100)).toPrecision(3);
      return names[row] + " · from token " + (tokens[column] ?? column) + " · " + value;
    };
    const show = (event) => {
      const point = local(svg, event);
      const column = Math.floor((point.x - left) / width * columns), row = Math.floor((point.y - top) / height * rows);
      return row >= 0 && row < rows && column >= 0 && column < columns ? put(row, column) : "";
    };
    const move = (key) => {
      const [row, column] = at ?? [0, 0];
      if (at && key in steps && steps[key][1]) return put(clamp(row + steps[key][1], 0, rows - 1), column);
      return !at && key in steps ? put(0, 0) : walk(key, column, columns, (next) => put(row, next));
    };
    reader(figure, show, move, () => { at = null; cursor.setAttribute("hidden", ""); });
  }

  for (const figure of all(".chart.scatter")) {
    const svg = figure.querySelector("svg");
    const cursor = svg.querySelector(".cursor");
    const [low, high, x0, x1, y0, y1] = svg.dataset.domain.split(" ").map(Number);
    const points = figure.querySelector(".points").getAttribute("d").split("M").slice(1).map((part) => part.split("h")[0].split(" ").map(Number));
    points.sort((a, b) => a[0] - b[0]);
    let place = -1;
    const put = (next) => {
      place = next;
      const [x, y] = points[place];
      cursor.removeAttribute("hidden");
      cursor.setAttribute("cx", x);
      cursor.setAttribute("cy", y);
      const value = (pixel, start, end) => low + (pixel - start) / (end - start) * (high - low);
      const r = value(x, x0, x1), t = value(y, y0, y1);
      return "rollout " + r.toFixed(2) + ", train " + t.toFixed(2) + ", probabilities about " + Math.exp(r).toPrecision(2) + " and " + Math.exp(t).toPrecision(2);
    };
    const show = (event) => {
      const point = local(svg, event);
      let best = -1, near = 200;
      points.forEach(([x, y], i) => {
        const far = (x - point.x) ** 2 + (y - point.y) ** 2;
        if (far < near) { near = far; best = i; }
      });
      return best < 0 ? "" : put(best);
    };
    reader(figure, show, (key) => walk(key, place, points.length, put), () => { place = -1; cursor.setAttribute("hidden", ""); });
  }

  // ---- tokens ----
  const card = document.getElementById("card");
  const names = ["sequence", "index", "position", "id", "rollout", "train", "train - rollout", "span"];
  const fill = (element) => {
    const row = data.tokens[Number(element.id.slice(1))];
    const text = document.createElement("p");
    text.textContent = element.textContent;
    const list = document.createElement("dl");
    names.forEach((name, i) => {
      if (row[i] === "") return;
      const term = document.createElement("dt"), value = document.createElement("dd");
      term.textContent = name;
      value.textContent = row[i];
      list.append(term, value);
    });
    card.replaceChildren(text, list);
  };
  const placeCard = (element) => {
    const spot = element.getBoundingClientRect();
    card.hidden = false;
    const below = spot.bottom + 8 + card.offsetHeight < innerHeight;
    card.style.left = clamp(spot.left, 8, Math.max(8, innerWidth - card.offsetWidth - 8)) + "px";
    card.style.top = (below ? spot.bottom + 8 : Math.max(8, spot.top - card.offsetHeight - 8)) + "px";
  };
  const strips = all(".strip");
  for (const strip of strips) {
    const tokens = all("b", strip);
    const size = (token) => Math.abs(parseFloat(data.tokens[Number(token.id.slice(1))][6])) || 0;
    const worst = tokens.map((_, i) => i).filter((i) => size(tokens[i]) > 0).sort((a, b) => size(tokens[b]) - size(tokens[a])).slice(0, 50);
    let place = -1;
    const put = (next, scroll) => {
      if (tokens[place]) tokens[place].classList.remove("on");
      place = next;
      const token = tokens[place];
      if (!token) { card.hidden = true; strip.removeAttribute("aria-description"); return; }
      token.classList.add("on");
      if (scroll) token.scrollIntoView({ block: "nearest" });
      fill(token);
      placeCard(token);
      strip.setAttribute("aria-description", card.textContent);
    };
    // up and down: the nearest token in the next line
    const vertical = (way) => {
      const here = tokens[place].getBoundingClientRect();
      const line = (token) => Math.round((token.getBoundingClientRect().top - here.top) / 10) * way;
      let goal = place;
      while (tokens[goal + way] && line(tokens[goal]) <= 0) goal += way;
      const target = line(tokens[goal]);
      let best = goal;
      for (let i = goal; tokens[i] && line(tokens[i]) === target; i += way) {
        const far = (j) => Math.abs(tokens[j].getBoundingClientRect().left - here.left);
        if (far(i) < far(best)) best = i;
      }
      return best;
    };
    strip.addEventListener("pointerover", (event) => { const i = tokens.indexOf(event.target); if (i >= 0) put(i, false); });
    strip.addEventListener("pointerleave", () => put(-1, false));
    strip.addEventListener("blur", () => put(-1, false));
    strip.addEventListener("scroll", () => { if (tokens[place]) placeCard(tokens[place]); });
    strip.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      let next = null;
      if (event.key === "Home") next = 0;
      else if (event.key === "End") next = tokens.length - 1;
      else if (event.key === "Escape") next = -1;
      else if (event.key in steps) {
        const [x, y] = steps[event.key];
        next = place < 0 ? 0 : y ? vertical(y) : clamp(place + x, 0, tokens.length - 1);
      } else if (event.key === "w" || event.key === "W") {
        const rank = worst.indexOf(place), count = worst.length;
        if (count) next = worst[event.key === "w" ? (rank + 1) % count : (Math.max(rank, 0) + count - 1) % count];
      }
      if (next === null) return;
      event.preventDefault();
      put(next, true);
    });
    strip.showToken = (token) => { strip.focus({ preventScroll: true }); put(tokens.indexOf(token), true); };
  }
  for (const link of all('.tokens a[href^="#t"]')) {
    link.addEventListener("click", (event) => {
      const token = document.getElementById(link.hash.slice(1));
      event.preventDefault();
      const fold = token.closest("details");
      if (fold) fold.open = true;
      token.closest(".strip").scrollIntoView({ block: "center" });
      token.closest(".strip").showToken(token);
    });
  }
})();
