// Formulas drawn by KaTeX as MathML, which browsers show without more styles or fonts.
document.addEventListener("DOMContentLoaded", () => {
  for (const place of document.querySelectorAll(".arithmatex")) {
    const [, opening, source] = place.textContent.match(/^\s*(\\[(\[])([\s\S]*)\\[)\]]\s*$/);
    katex.render(source, place, { output: "mathml", displayMode: opening === "\\[", throwOnError: false });
  }
});
