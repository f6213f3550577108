// Keeps the end of a scrolling element in view while its content grows, unless the user has scrolled up.

const NEAR_PIXELS = 60;

// The size of the content is read right after the browser's own layout. Following it therefore causes no layout.
export class EndFollower {
  constructor(scroller) {
    this.atEnd = true;
    this.watched = null;
    scroller.addEventListener('scroll', () => {
      this.atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PIXELS;
    }, { passive: true });
    this.observer = new ResizeObserver(() => {
      if (this.atEnd) scroller.scrollTop = scroller.scrollHeight;
    });
  }

  // Goes to the end, and follows the growth of `element`, which is the last part of the content.
  start(element) {
    this.atEnd = true;
    this.watch(element);
  }

  // Follows the growth of another last part.
  watch(element) {
    if (element === this.watched) return;
    this.watched = element;
    this.observer.disconnect();
    if (element) this.observer.observe(element);
  }
}
