// Questions that the embedded demo pair can answer, as buttons. Other models get no examples.

// The version of the embedded target's weights, models/demo/target.
const DEMO_WEIGHTS = 'bdf2c309a7fa593f';
const QUESTIONS = [
  'List 3 countries and their capitals.',
  'Write a Python function that adds two numbers.',
  'How many centimeters are in 3 meters?',
  'Tell me a short story about a fox.',
];

// Shows the examples if the served weights are those of the demo pair. `onPick(question)` asks one.
export function showExamples(weightVersion, onPick) {
  const list = document.getElementById('examples');
  if (weightVersion !== DEMO_WEIGHTS || list.children.length) return;
  const buttons = QUESTIONS.map((question) => {
    const button = document.createElement('button');
    button.type = 'button';
    button.textContent = question;
    button.addEventListener('click', () => onPick(question));
    return button;
  });
  list.replaceChildren(...buttons);
  document.getElementById('examples-row').hidden = false;
}
