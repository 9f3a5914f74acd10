r"""Answers that are equal: `one ~ other` on each line. Read by test_math_pairs."""

# ruff: noqa: RUF001
EQUAL = r"""
3e8 ~ 3\times10^8
3\times10^8 ~ 3e8
3e8 ~ 300000000
1.5e-3 ~ 0.0015
6.02 \times 10^{23} ~ 6.02e23
3 x 10^8 ~ 3 \cdot 10^{8}
2.5\times 10^{-3} ~ \frac{1}{400}
2 1/2 ~ 2.5
2\frac{1}{2} ~ 2.5
2\frac12 ~ \frac{5}{2}
-1 \frac{3}{4} ~ -1.75
2½ ~ 5/2
\frac{1}{2} ~ 0.5
\dfrac{3}{4} ~ 3/4
\tfrac{3}{4} ~ 0.75
\frac34 ~ 0.75
-\frac{3}{4} ~ \frac{-3}{4}
\frac{6}{8} ~ \frac{3}{4}
2/4 ~ 1/2
0.50 ~ 0.5
7.0 ~ 7
07 ~ 7
1,234 ~ 1234
1,234,567.50 ~ 1234567.5
1{,}234 ~ 1234
1\,234 ~ 1234
12 345 ~ 12345
\$1,234 ~ 1234
$1,234.00 ~ 1234
\$36 ~ 36 dollars
36 ~ \$36
-\$5 ~ -5
50\% ~ 50
50\% ~ 0.5
50% ~ 50\%
12.5\% ~ \frac{1}{8}
50 percent ~ 50\%
90^\circ ~ 90
90° ~ 90^{\circ}
90 degrees ~ 90^\circ
7\text{ cm} ~ 7
7 cm ~ 7\,\text{centimeters}
7\text{ cm}^2 ~ 7 square centimeters
7 apples ~ 7
3 hours ~ 3
60 \text{ miles per hour} ~ 60
x=5 ~ 5
5 ~ x = 5
x = 5 ~ 5 = x
y = 2x + 1 ~ 2x+1
y=2x+1 ~ y - 2x = 1
2x - 4y = 6 ~ x - 2y = 3
f(x) = x^2 ~ x^2
3+4=7 ~ 7
x = 3 + 4 = 7 ~ 7
0.\overline{3} ~ \frac{1}{3}
0.333... ~ 1/3
0.1\overline{6} ~ \frac16
0.(3) ~ 1/3
0.1666\ldots ~ 1/6
0.\overline{142857} ~ 1/7
\sqrt{8} ~ 2\sqrt{2}
\sqrt2 ~ \sqrt{2}
\frac{1}{\sqrt{2}} ~ \frac{\sqrt{2}}{2}
√8 ~ 2\sqrt{2}
2sqrt(3) ~ 2\sqrt{3}
\sqrt[3]{27} ~ 3
\sqrt{16} ~ 4
2^{1/2} ~ \sqrt{2}
\frac{\pi}{2} ~ 0.5\pi
2π ~ 2\pi
2pi ~ 2\pi
\pi/2 ~ \frac{\pi}{2}
e^{2} ~ e^2
\ln 4 ~ 2\ln 2
(x+1)^2 ~ x^2+2x+1
2x+3 ~ 3+2x
xy ~ yx
\frac{x^2-1}{x+1} ~ x-1
\sin^2 x + \cos^2 x ~ 1
n! ~ n!
5! ~ 120
\binom{5}{2} ~ 10
i^2 ~ -1
3+4i ~ 4i+3
7 or 8 ~ 8 or 7
7 or 8 ~ 7, 8
x = 7 or x = 8 ~ 7, 8
x=1, x=-2 ~ -2, 1
x = 1, 2 ~ 1,2
3 \text{ and } 5 ~ 3, 5
\{1,2,3\} ~ \{3,2,1\}
\{1, 2\} ~ 1, 2
\left\{1, 2\right\} ~ \{1,2\}
\emptyset ~ \{\}
\varnothing ~ \emptyset
\pm 3 ~ 3, -3
\pm 3 ~ -3, 3
±3 ~ \pm 3
1 \pm \sqrt{2} ~ 1+\sqrt{2}, 1-\sqrt{2}
x = \pm 2 ~ \{-2, 2\}
(1,2) ~ \left(1, 2\right)
(1, \frac{1}{2}) ~ (1, 0.5)
(0.5, 2) ~ (1/2, 2)
[0,1) ~ \left[0, 1\right)
(-\infty, 3) ~ (-∞, 3)
(-\infty, 1) \cup (2, \infty) ~ (2,\infty)\cup(-\infty,1)
x \in (1,2] ~ (1,2]
1 < x \le 2 ~ (1,2]
2 \ge x > 1 ~ 1 < x \leq 2
x > 3 ~ (3, \infty)
3 < x ~ x > 3
x \leq 4 ~ (-\infty, 4]
x ≥ 2 ~ [2, \infty)
\mathbb{R} ~ (-\infty, \infty)
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ~ \begin{bmatrix}1&2\\3&4\end{bmatrix}
\begin{pmatrix} 1 \\ \frac12 \end{pmatrix} ~ \begin{pmatrix} 1 \\ 0.5 \end{pmatrix}
\text{Tuesday} ~ Tuesday
\text{Tuesday} ~ tuesday
\text{(B)} ~ B
(B) ~ B
\text{Yes} ~ yes
\text{DNE} ~ DNE
\text{May 5} ~ May 5
x=2, y=3 ~ y=3, x=2
\text{even} ~ even
−5 ~ -5
–5 ~ -5
5² ~ 25
1011_2 ~ 1011_{2}
2516_8 ~ 2516_{8}
\log_2 8 ~ 3
|{-3}| ~ 3
\left|-3\right| ~ 3
$x = 5$ ~ 5
5. ~ 5
\displaystyle\frac{1}{2} ~ 0.5
{7} ~ 7
+7 ~ 7
3\cdot 4 ~ 12
3 × 4 ~ 12
2^{10} ~ 1024
10^6 ~ 1,000,000
5 million ~ 5,000,000
1.2 million ~ 1200000
\frac{1}{3} ~ 0.33333333
1.41421356 ~ \sqrt{2}
x^2 + y^2 = 25 ~ y^2 + x^2 = 25
\sqrt{x^2+1} ~ (x^2+1)^{1/2}
(1,2), (3,4) ~ (3,4), (1,2)
\{(1,2),(3,4)\} ~ (1,2), (3,4)
\langle 1,2,3\rangle ~ (1,2,3)
2.0\times 10^1 ~ 20
-0.5 ~ -\frac12
-0 ~ 0
\frac{5}{1} ~ 5
x=-\frac{1}{2} ~ -0.5
10\text{ m/s} ~ 10
45^\circ ~ 45\text{ degrees}
\frac{\sqrt{3}}{3} ~ \frac{1}{\sqrt 3}
a_1 = 3 ~ 3
P(A) = \frac{1}{6} ~ 1/6
\text{Area} = 12 ~ 12
2+2=4 ~ 4
\frac{1}{2}\pi ~ \pi/2
4.50 ~ \$4.50
x \neq 3 ~ x \ne 3
\approx 3.14 ~ 3.14
\frac{7}{3} ~ 2\frac{1}{3}
2 \tfrac{1}{3} ~ 7/3
1.0 \times 10^{-3} ~ 0.001
1e-3 ~ 0.001
10^{-3} ~ 0.001
$\frac{1}{2}$ ~ .5
5\% ~ 0.05
\$1{,}000 ~ 1000
\$1,000.50 ~ 1000.5
€5 ~ 5
3\sqrt{2} ~ \sqrt{18}
\sqrt[3]{16} ~ 2\sqrt[3]{2}
\sqrt{\frac{1}{4}} ~ 0.5
\left(\frac{1}{2}, 3\right) ~ (0.5, 3)
(-3,\infty) ~ (-3, +\infty)
x\in[-1,1] ~ [-1,1]
-1\le x\le 1 ~ [-1,1]
x<2 \text{ or } x>5 ~ (-\infty,2)\cup(5,\infty)
x < 2 or x > 5 ~ x > 5 or x < 2
\left\{ -1, 0, 1 \right\} ~ \{0, 1, -1\}
\{x=1\} ~ 1
6\pi \text{ cm} ~ 6\pi
6π ~ 18.84955592
72^\circ ~ 72 \text{ degrees}
\angle ABC = 60^\circ ~ 60
\text{The answer is } 5 ~ 5
5\text{ apples} ~ 5
0.\overline{9} ~ 1
0.\overline{12} ~ \frac{4}{33}
0.8\overline{3} ~ 5/6
2.5\overline{0} ~ 2.5
\frac{x+1}{2} ~ (x+1)/2
x(x+1) ~ x^2+x
-x+1 ~ 1-x
y = mx + b ~ mx+b
y = 3x - 2 ~ 3x - y = 2
x + 2 y - 3 = 0 ~ x+2y=3
e^{i\pi} ~ -1
\log_{10} 100 ~ 2
\ln e ~ 1
\frac{\sqrt{6}+\sqrt{2}}{4} ~ \cos 15^\circ
\sin 30^\circ ~ 1/2
\sin\frac{\pi}{6} ~ 0.5
1+2i ~ 2i+1
12\,345\,678 ~ 12345678
12 345 678 ~ 12,345,678
1\,000 ~ 10^3
\text{A} ~ A
\mathbf{B} ~ B
\textbf{(C)} ~ C
\begin{bmatrix} 1 \\ 2 \end{bmatrix} ~ \begin{pmatrix} 1.0 \\ 2 \end{pmatrix}
\left[\begin{array}{cc} 1 & 0 \\ 0 & 1\end{array}\right] ~ \begin{pmatrix}1&0\\0&1\end{pmatrix}
3 : 2 ~ 3:2
k = 0, 1, 2 ~ 0,1,2
a=1, b=2 ~ b=2, a=1
\sqrt{2}, -\sqrt{2} ~ \pm\sqrt{2}
\frac{-1 \pm \sqrt{5}}{2} ~ \frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}
x=\frac{-1\pm\sqrt{5}}{2} ~ \frac{-1 \pm \sqrt{5}}{2}
\lfloor 3.7 \rfloor ~ 3
\lceil 3.2\rceil ~ 4
\binom{10}{3} ~ 120
{10 \choose 3} ~ 120
\frac{3}{2}x ~ 1.5x
\frac{10}{4} ~ \frac52
$7$ or $8$ ~ 7, 8
-\frac{\pi}{4} ~ -0.25\pi
\tan^{-1}(1) ~ \frac{\pi}{4}
\text{no solution} ~ No solution
\text{infinitely many} ~ infinitely many
25 square units ~ 25
25 \text{ units}^2 ~ 25
4 \text{ ft}^3 ~ 4
16\text{ mph} ~ 16
\$12.50 \text{ per hour} ~ 12.50
18\text{ years old} ~ 18
1\frac34 ~ 1.75
-2 1/2 ~ -2.5
12\% ~ 12 percent
\infty ~ ∞
1-\frac{1}{\mathrm{e}} ~ \frac{e-1}{e}
3+4i ~ 3+4\mathrm{i}
2\mathrm{e}^{3} ~ 2e^3
\ln 2 ~ \operatorname{ln} 2
\frac{\pi}{2} ~ \frac{\mathrm{\pi}}{2}
\frac{1000}{3} ~ \frac{\mathrm{1,000}}{3}
\sqrt{1/n} ~ \frac{1}{\sqrt n}
\sqrt{ab} ~ \sqrt{a}\sqrt{b}
\ln(ab) ~ \ln a+\ln b
5 - 5c ~ 5-5*c
\sin(\frac{\pi x}{5}) ~ sin(pi*x/5)
10 ~ C(5,2)
7 ~ 7 \pmod{10}
7 \pmod{10} ~ 17 \bmod 10
(2,3) ~ x=2, y=3
3:4 ~ 6:8
2:1 ~ 2
3:4 ~ \frac34
\sqrt{2}:1 ~ 2:\sqrt{2}
9:30 am ~ 9:30 a.m.
15:30 ~ 3:30 pm
28\% ~ 28 percentage points
28\% ~ 28\text{ per cent}
x+c ~ x + c \text{ for any constant } c
f(x)=c-x ~ f(x)=-x+c
\sqrt{2}+\sqrt{3} ~ \sqrt{5+2\sqrt{6}}
\frac{n(n+1)}{2} ~ \sum_{i=1}^{n} i
\sum_{i=1}^{n} i^2 ~ \sum_{k=1}^{n} k^2
x^2+1 ~ (x+i)(x-i)
n(n-i) ~ n^2-ni
2\cos\theta ~ e^{i\theta}+e^{-i\theta}
x^2+1=0 ~ (x+i)(x-i)=0
(1,2),(3,4) ~ (3,4),(1,2)
"""
