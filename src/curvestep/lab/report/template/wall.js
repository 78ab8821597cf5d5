"use strict";
// The worst-case function f(x) = (L0/L1²)(e^{L1|x|} − L1|x| − 1): its curvature is L0 + L1|f′| everywhere.
window.curvestepWall = {
  // e^a − a − 1; by its series near zero, where the formula loses its digits.
  phi: (a) => (a < 1e-3 ? a * a * (0.5 + a / 6 + a * a / 24) : Math.expm1(a) - a),
  value(x, { L0, L1 }) { return (L0 / (L1 * L1)) * this.phi(L1 * Math.abs(x)); },
  slope(x, { L0, L1 }) { return Math.sign(x) * (L0 / L1) * Math.expm1(L1 * Math.abs(x)); },
  start({ L0, L1, M }) { return Math.log1p((L1 * M) / L0) / L1; },
  // Above this fixed step, descent from the start diverges.
  limit({ L0, L1, M }) { return (2 * Math.log1p((L1 * M) / L0)) / (L1 * M); },
  maxNorm: ({ L0, L1 }) => L0 / L1,
  // Iterates x and slopes |f′| of descent with this step, clipped at maxNorm; ends where a number overflows.
  descend(wall, step, maxNorm, num) {
    const xs = [this.start(wall)], slopes = [Math.abs(this.slope(xs[0], wall))];
    for (let k = 0; k < num; k++) {
      const g = this.slope(xs[k], wall);
      const x = xs[k] - step * Math.min(1, maxNorm / Math.abs(g) || 0) * g;
      const next = Math.abs(this.slope(x, wall));
      if (!Number.isFinite(next)) break;
      xs.push(x);
      slopes.push(next);
      if (next === 0) break;
    }
    return { xs, slopes, escaped: xs.length <= num && slopes[slopes.length - 1] !== 0 };
  },
};
