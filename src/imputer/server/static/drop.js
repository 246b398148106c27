// Files dropped anywhere on the page.

export function acceptDrops(veil, onFile) {
  const carriesFile = (event) => event.dataTransfer?.types.includes("Files");
  let depth = 0; // dragenter and dragleave come for every element on the way
  const enter = (change) => (event) => {
    if (!carriesFile(event)) return;
    depth = Math.max(0, depth + change);
    veil.hidden = depth === 0;
  };
  document.addEventListener("dragenter", enter(1));
  document.addEventListener("dragleave", enter(-1));
  document.addEventListener("dragover", (event) => carriesFile(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    const [file] = event.dataTransfer.files;
    if (file) onFile(file);
  });
}
