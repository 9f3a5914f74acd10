// Saves a chart as a picture (PNG) or as a table (CSV), made in the browser.

import { colour } from "./switch.js";

const MARGIN = 16;
const LINE = 22;

/** Save what is drawn, with its title and legend, in the colours of the page. */
export function savePicture(chart) {
  const plot = chart.plot.ctx.canvas;
  const scale = devicePixelRatio || 1;
  const rows = 1 + chart.lines.filter((line) => line.name).length;
  const canvas = document.createElement("canvas");
  canvas.width = plot.width + 2 * MARGIN * scale;
  canvas.height = plot.height + (rows * LINE + 2 * MARGIN) * scale;
  const pen = canvas.getContext("2d");
  pen.fillStyle = colour("surface");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.scale(scale, scale);
  pen.textBaseline = "middle";
  pen.fillStyle = colour("ink");
  pen.font = "600 15px system-ui, sans-serif";
  const { title, unit } = chart.options;
  pen.fillText(unit ? `${title} (${unit})` : title, MARGIN, MARGIN + LINE / 2);
  pen.font = "13px system-ui, sans-serif";
  chart.lines.filter((line) => line.name).forEach((line, at) => {
    const y = MARGIN + (at + 1.5) * LINE;
    const { stroke, dash } = chart.styleOf(line);
    pen.strokeStyle = stroke;
    pen.lineWidth = 2;
    pen.setLineDash(dash);
    pen.beginPath();
    pen.moveTo(MARGIN, y);
    pen.lineTo(MARGIN + 28, y);
    pen.stroke();
    pen.fillText(line.name, MARGIN + 36, y);
  });
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.drawImage(plot, MARGIN * scale, (rows * LINE + MARGIN) * scale);
  canvas.toBlob((blob) => save(blob, `${nameOf(chart)}.png`), "image/png");
}

/** Save the figures as they were measured, not smoothed; one column for each run. */
export async function saveTable(chart) {
  let lines;
  try {
    lines = (await chart.options.fetchAll?.()) ?? chart.lines;
  } catch (error) {
    chart.note.hidden = false;
    chart.note.textContent = `Not saved: ${error.what ?? error.message}`;
    return;
  }
  const { title, isTime } = chart.options;
  const columns = lines.map((line) => new Map(line.xs.map((x, at) => [x, line.ys[at]])));
  const xs = [...new Set(lines.flatMap((line) => [...line.xs]))].sort((a, b) => a - b);
  const head = [isTime ? "seconds" : "step",
    ...lines.map((line) => (line.name ? `${title} ${line.name}` : title))];
  const rows = xs.map((x) => [x, ...columns.map((column) => column.get(x) ?? "")]);
  const text = [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n");
  save(new Blob([`${text}\r\n`], { type: "text/csv" }), `${nameOf(chart)}.csv`);
}

function cell(value) {
  return typeof value === "string" && /[",\r\n]/.test(value) ? `"${value.replaceAll('"', '""')}"`
    : String(value);
}

function nameOf(chart) {
  return chart.options.title.replaceAll(/[^\w.-]+/g, "-");
}

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
