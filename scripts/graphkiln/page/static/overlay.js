// Boxes, masks and key points on a canvas that lies over the image.

const HUES = [18, 205, 140, 280, 48, 330, 175, 95, 245, 0];
const MOST_PIXELS = 16_000_000;
const FEWEST = 640;

/** The color of a class or a detection. */
export const color = (at, alpha = 1) => `hsl(${HUES[at % HUES.length]} 75% ${Math.floor(at / HUES.length) % 2 ? 38 : 55}% / ${alpha})`;

/** Draws an answer at the size of its image; of a small one larger, or nobody could read the labels. */
export function draw(canvas, { width, height, detections = [], segments = [] }) {
  const scale = Math.min(Math.max(1, FEWEST / Math.max(1, width, height)), Math.sqrt(MOST_PIXELS / Math.max(1, width * height)));
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = canvas.getContext("2d");
  for (const { index, mask } of segments) paint(context, mask, color(index, 0.5), canvas);
  for (const [at, { mask }] of detections.entries()) if (mask) paint(context, mask, color(at, 0.45), canvas);
  context.scale(canvas.width / width, canvas.height / height);
  const unit = Math.max(width, height) / 320;
  for (const [at, detection] of detections.entries()) outline(context, detection, color(at), unit);
}

/** Paints a mask of COCO's run lengths: columns from top to bottom, the first run is outside. */
function paint(context, { size: [height, width], counts }, fill, canvas) {
  const layer = document.createElement("canvas");
  layer.width = width;
  layer.height = height;
  const inside = layer.getContext("2d");
  inside.fillStyle = fill;
  let at = 0;
  for (const [run, count] of counts.entries()) {
    if (run % 2) columns(inside, at, count, height);
    at += count;
  }
  context.drawImage(layer, 0, 0, canvas.width, canvas.height);
}

function columns(context, begin, count, height) {
  for (let at = begin, left = count; left > 0; ) {
    const row = at % height;
    const run = Math.min(left, height - row);
    context.fillRect(Math.floor(at / height), row, 1, run);
    at += run;
    left -= run;
  }
}

function outline(context, { box: [x1, y1, x2, y2], label, index, score, keypoints = [] }, stroke, unit) {
  context.lineWidth = 1.5 * unit;
  context.strokeStyle = context.fillStyle = stroke;
  context.strokeRect(x1, y1, x2 - x1, y2 - y1);
  for (const [x, y] of keypoints.filter(([, , sure]) => sure > 0)) {
    context.beginPath();
    context.arc(x, y, 2 * unit, 0, 2 * Math.PI);
    context.fill();
  }
  const text = `${label || `class ${index}`} ${Math.round(score * 100)}%`;
  context.font = `600 ${10 * unit}px system-ui, sans-serif`;
  const top = Math.max(y1, 14 * unit);
  context.fillRect(x1 - 0.75 * unit, top - 14 * unit, context.measureText(text).width + 8 * unit, 14 * unit);
  context.fillStyle = "#fff";
  context.fillText(text, x1 + 3 * unit, top - 3.5 * unit);
}
