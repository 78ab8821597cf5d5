// Formulas, by the copy of KaTeX in this folder: arithmatex leaves \(...\) and \[...\] in spans and divs.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".arithmatex").forEach((element) => {
    const [, open, formula] = element.textContent.trim().match(/^\\([[(])([\s\S]*)\\[\])]$/);
    katex.render(formula, element, { displayMode: open === "[", throwOnError: false });
  });
});
