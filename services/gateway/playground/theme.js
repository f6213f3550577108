// Switches between the system's, the light and the dark colours. The tab remembers the choice.

const THEMES = ['auto', 'light', 'dark'];
const KEY = 'outrider-colours';

// The storage can be turned off. The buttons then work until the page is left.
function remembered(theme) {
  try {
    if (theme) sessionStorage.setItem(KEY, theme);
    return sessionStorage.getItem(KEY);
  } catch {
    return theme;
  }
}

export function installTheme(button) {
  let theme = THEMES.find((one) => one === remembered()) ?? 'auto';
  const show = () => {
    if (theme === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Colours: ${theme}`;
  };
  button.addEventListener('click', () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    show();
    remembered(theme);
  });
  show();
}
