// A small line chart: a title, the latest value, and the values of the last two minutes.

const SVG = 'http://www.w3.org/2000/svg';
const POINTS = 120;

export class Chart {
  constructor(parent, title, format) {
    this.title = title;
    this.format = format;
    this.values = [];
    const card = document.createElement('section');
    card.className = 'card chart';
    const heading = document.createElement('h2');
    heading.textContent = title;
    this.now = document.createElement('strong');
    this.svg = document.createElementNS(SVG, 'svg');
    this.svg.setAttribute('viewBox', `0 0 ${POINTS - 1} 40`);
    this.svg.setAttribute('preserveAspectRatio', 'none');
    this.svg.setAttribute('role', 'img');
    this.area = this._path('area');
    this._path('base').setAttribute('d', `M0 39.5H${POINTS - 1}`);
    this.line = this._path('line');
    card.append(heading, this.now, this.svg);
    parent.append(card);
    this.add(null);
  }

  _path(name) {
    const path = document.createElementNS(SVG, 'path');
    path.setAttribute('class', name);
    this.svg.append(path);
    return path;
  }

  // Begins with the values of earlier seconds, oldest first.
  begin(values) {
    this.values = values.slice(0, -1);
    this.add(values.at(-1) ?? null);
  }

  // Adds the value of one second; null leaves a gap.
  add(value) {
    this.values = [...this.values, value].slice(-POINTS);
    const text = value === null ? '–' : this.format(value);
    this.now.textContent = text;
    const most = Math.max(1e-9, ...this.values.map((one) => one ?? 0));
    this.svg.setAttribute('aria-label', `${this.title}: ${text}, at most ${this.format(most)} in two minutes`);
    const first = POINTS - this.values.length;
    let line = '';
    let area = '';
    this.values.forEach((one, index) => {
      const x = first + index;
      const y = (39 - ((one ?? 0) / most) * 36).toFixed(1);
      const alone = !index || this.values[index - 1] === null;
      line += one === null ? '' : alone ? `M${x - 0.5} ${y}L${x} ${y}` : `L${x} ${y}`;
      area += `${index ? 'L' : `M${first} 39L`}${x} ${y}`;
    });
    this.line.setAttribute('d', line);
    this.area.setAttribute('d', `${area}L${POINTS - 1} 39Z`);
  }
}
