// Pictures that a model was shown, small and at their places in texts; a click shows one in full size.
import { h, number } from "./dom.js";

/** What stands for a picture in a prompt's text. */
const MARK = "<image>";
/** Smaller ones are enlarged so far, pixel by pixel. */
const LEAST_EDGE = 480;

/** Pieces of a prompt's last text: its marks are the last pictures, and what stands before it had the others. `names`: null for
 *  one that is not kept. */
export function marked(text, names, run, shown) {
  if (!names.length) return [shown(text)];
  const earlier = Math.max(0, names.length - text.split(MARK).length + 1);
  const [first, ...rest] = shown(text).split(MARK);
  return [...names.slice(0, earlier).map((name, index) => picture(names, index, run)), first,
    ...rest.flatMap((after, index) => [earlier + index < names.length ? picture(names, earlier + index, run) : MARK, after])];
}

/** Pieces of a message's content that is made of parts. */
export function parted(parts, names, run, shown) {
  return parts.map((part) =>
    part?.type === "text" ? shown(part.text) : part?.type === "image" ? picture(names, part.picture, run) : shown(JSON.stringify(part)));
}

function picture(names, index, run) {
  const name = names[index];
  const title = Number.isInteger(index) ? `picture ${index + 1}` : "picture";
  if (!name) return missing(title);
  const image = h("img", { src: `/picture?${new URLSearchParams({ run, name })}`, alt: title, loading: "lazy" });
  const button = h("button.picture", { type: "button", title, onclick: () => enlarged(image, title) }, image);
  image.onload = () => (button.title = `${title}: ${number(image.naturalWidth)} × ${number(image.naturalHeight)}`);
  image.onerror = () => button.replaceWith(missing(title));
  return button;
}

const missing = (title) => h("span.faint", { title: "see tracking.pictures_gib" }, `[${title}, which was not kept]`);

function enlarged(small, title) {
  const told = h("p.faint", {}, title), image = h("img", { src: small.src, alt: title });
  image.onload = () => { // the small one may not have been there yet
    const { naturalWidth: width, naturalHeight: height } = image;
    const times = Math.max(1, Math.floor(LEAST_EDGE / Math.max(width, height, 1)));
    if (times > 1) Object.assign(image.style, { width: `${times * width}px`, imageRendering: "pixelated" });
    told.textContent = `${title}: ${number(width)} × ${number(height)}${times > 1 ? `, ${times} times as large` : ""}`;
  };
  const dialog = h("dialog.enlarged", { "aria-label": title, onclick: () => dialog.close(), onclose: () => dialog.remove() },
    told, image, h("form", { method: "dialog" }, h("button", {}, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
