// Switches between the system's, the light and the dark colours.

const THEMES = ['auto', 'light', 'dark'];

export function installTheme(button) {
  let theme = 'auto';
  const show = () => {
    if (theme === 'auto') delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Colours: ${theme}`;
  };
  button.addEventListener('click', () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    show();
  });
  show();
}
