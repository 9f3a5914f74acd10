"use strict";
/* Puts a chart to look into over each still picture. Without scripts the pictures stay. */
(function () {
  var data = JSON.parse(document.getElementById("data").textContent);
  var dark = window.matchMedia("(prefers-color-scheme: dark)");
  var drawn = [];
  function series(line) {
    var color = data.colors[dark.matches ? 1 : 0][line.color % data.colors[0].length];
    var dots = line.dots || line.y.length < 2;
    return {
      label: line.name, stroke: line.faint ? color + "59" : color, width: dots ? 0 : 2,
      spanGaps: true, points: { show: dots, size: 8, fill: color, width: 0 },
      value: function (_, v) { return v == null ? "-" : String(Number(v.toPrecision(5))); }
    };
  }
  function words(_, ticks) {
    var most = Math.max.apply(null, ticks.map(Math.abs));
    return ticks.map(function (v) {
      if (v && (most < 1e-3 || most >= 1e6)) return v.toExponential(1);
      return Number(v.toPrecision(6)).toLocaleString("en");
    });
  }
  function joined(lines) {
    var places = new Map();
    lines.forEach(function (line) { line.x.forEach(function (x) { places.set(x, 0); }); });
    var xs = Array.from(places.keys()).sort(function (a, b) { return a - b; });
    xs.forEach(function (x, place) { places.set(x, place); });
    return [xs].concat(lines.map(function (line) {
      var ys = new Array(xs.length).fill(null);
      line.x.forEach(function (x, place) { ys[places.get(x)] = line.y[place]; });
      return ys;
    }));
  }
  function draw() {
    var style = getComputedStyle(document.documentElement);
    var ink = style.getPropertyValue("--quiet").trim();
    var grid = { stroke: style.getPropertyValue("--line").trim(), width: 1 };
    drawn.forEach(function (plot) { plot.destroy(); });
    drawn = [];
    data.charts.forEach(function (chart) {
      var figure = document.getElementById("chart-" + chart.name);
      if (!figure || !window.uPlot) return;
      var place = figure.querySelector(".live");
      figure.classList.add("is-live");
      var wide = Math.max(260, figure.clientWidth);
      var axis = { stroke: ink, grid: grid, ticks: grid };
      var plot = new uPlot({
        width: wide, height: Math.round(Math.max(190, Math.min(300, wide * 0.42))),
        title: chart.title, scales: { x: { time: false }, y: chart.zero ?
          { range: function (_, low, high) { return uPlot.rangeNum(Math.min(0, low), high, 0.1, true); } } : {} },
        axes: [axis, Object.assign({ size: 62, values: words }, axis)],
        legend: { markers: { width: 2 } },
        series: [{ label: "step" }].concat(chart.lines.map(series)),
        cursor: { drag: { x: true, y: false } }
      }, joined(chart.lines), place);
      drawn.push(plot);
    });
  }
  var waiting = 0;
  window.addEventListener("resize", function () {
    clearTimeout(waiting);
    waiting = setTimeout(draw, 150);
  });
  dark.addEventListener("change", draw);
  draw();
})();
