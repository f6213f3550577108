// On a narrow screen, the draft tree and the speed stand directly below the answer, so that both are in view.

const NARROW = matchMedia('(max-width: 900px)');
const $ = (id) => document.getElementById(id);

function place() {
  if (NARROW.matches) $('below-answer').append($('live'));
  else $('tree-card').prepend($('live'));
}

// Places the tree now, and again when the screen becomes narrow or wide.
export function followWidth() {
  NARROW.addEventListener('change', place);
  place();
}

// Scrolls a narrow screen to the answer, whose tree and speed then follow it on the same screen.
export function goToAnswer() {
  if (NARROW.matches) document.querySelector('[role="tabpanel"]:not([hidden])').scrollIntoView({ block: 'start' });
}

// Shows or hides the place below the answer. Before the first answer, a phone has more room for the questions.
export function showBelowAnswer(shown) {
  $('below-answer').classList.toggle('asked', shown);
}
