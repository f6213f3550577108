// Hints: buttons whose explanation appears while they have the pointer or the focus. Escape hides it.

export function installHints() {
  document.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && document.activeElement.matches('.hint > button')) document.activeElement.blur();
  });
}
