"""Pictures as SVG: lines with axes, sparklines, stacked bars. Pure; without scripts, and without
fonts from elsewhere. Used by model cards and reports."""
