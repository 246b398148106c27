// The text, to take along: clipboard and files.

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // pages that are neither https nor localhost have no clipboard
  }
}

function copyBySelection(text) {
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  focused?.focus();
}

export function download(name, kind, content) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type: kind === "json" ? "application/json" : "text/plain" }));
  link.download = `${name.replace(/\.[^.]*$/, "") || "transcript"}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
