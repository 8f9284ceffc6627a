"""The report on the reproduction of the paper: REPORT.md and report.html from results.csv and the published figures."""

import math
from pathlib import Path

from experiments.recipes import COMPARED_DIMS
from experiments.report import beyond, costs, facts, figures, large, tables
from experiments.report.checks import FEASIBLE, OPTIMUM, divergence_check, trace_checks
from experiments.report.document import Block, Bullets, Document, Figure, Figures, Paragraph, Section
from experiments.report.evidence import FIGURE_1, TABLE_1, Finding
from experiments.report.figures import Panel
from experiments.report.findings import agreement_sentences, beside_baselines, findings, summary
from experiments.report.numbers import PAPER_SEEDS, SMALL_DIM, Measurements, Published, counted, on_grid

TEXTS = Path(__file__).resolve().parents[1]
CORRUPTED = "mnist_c_approximation_quality"
SHOWN_VIOLATIONS = 20
CORRUPTED_COLOUR = "ood_extended"
DRAWN = (*FEASIBLE, "last-layer", OPTIMUM, "full")


def write_report(results_path: Path, output_folder: Path) -> None:
    """Write REPORT.md, report.html and figures/*.svg into a folder; parts that were not run are marked as missing."""
    measurements, published = Measurements.read(results_path), Published()
    _Report(measurements, published, results_path.parent).document().write(output_folder)


class _Report:
    """The sections of the report, from the results that exist."""

    def __init__(self, measurements: Measurements, published: Published, folder: Path) -> None:
        self.measurements, self.published, self.folder = measurements, published, folder
        # A variant of a data set, such as imagenet10-efficientnet, has the dimensions of the set itself.
        clean = [dataset for dataset in measurements.datasets if "/" not in dataset]
        quotes = {d: published.quote("authors_code", d.split("-")[0], "largest_s") for d in clean}
        self.largest = {dataset: quote.mean for dataset, quote in quotes.items() if quote is not None}
        self.compared = [
            *(
                (f"{name} (Table 1)", TABLE_1, tables.lines_of(published, TABLE_1, name.lower()))
                for name in ("FashionMNIST", "CIFAR10", "ImageNet10")
            ),
            ("MNIST-C, approximation", CORRUPTED, tables.lines_of(published, CORRUPTED)),
            ("MNIST-C, scores", "mnist_c_uq_eval", tables.lines_of(published, "mnist_c_uq_eval")),
            ("CIFAR10-C (Table 2)", CORRUPTED_COLOUR, tables.lines_of(published, CORRUPTED_COLOUR)),
        ]
        others = [d for d in measurements.datasets if d not in (*FIGURE_1, *large.SETS) and "/" not in d]
        self.large = [d for d in large.SETS if d in measurements.datasets]
        self.clean = [*(d for d in FIGURE_1 if d in measurements.datasets), *others]

    def document(self) -> Document:
        sections = [
            self._findings(),
            Section("How to read the tables", [_bullets("reading.md", 0)]),
            self._coverage(),
            self._figure_1(),
            self._figure_2(),
            self._scores(),
            self._corrupted(),
            self._likelihoods(),
            self._baselines(),
            self._beyond(),
            self._trace_criterion(),
            self._bounds(),
            self._small_and_large(),
            self._dead_parameters(),
            self._prior(),
            self._costs(),
            self._remarks(),
            Section("What trained ResNets show", [_bullets("findings.md", 1)]),
            Section("Names", [_bullets("reading.md", 1), facts.names(self.published)]),
        ]
        introduction = (
            "The experiments of Faller and Martin, Low Rank Based Subspace Inference for the Laplace Approximation of "
            "Bayesian Neural Networks (AISTATS 2026), run with sublaplace. Every number of ours is computed from "
            "results.csv, every number of the paper from published/*.csv; −∞ is the logarithm of a trace that is zero "
            "in at least one seed."
        )
        return Document("Reproduction of the paper", introduction, sections)

    def _findings(self) -> Section:
        found = findings(self.measurements, self.published, self.largest)
        blocks: list[Block] = [Paragraph(summary(found, self.measurements)), self._listed(found)]
        blocks.append(Paragraph("How our numbers compare with those of the paper's tables:"))
        blocks.append(Bullets(agreement_sentences(self.measurements, self.published, self.compared)))
        sentences = [s for d in ("fashionmnist", "mnist", *self.large) if (s := beside_baselines(self.measurements, d))]
        if sentences:
            blocks += [Paragraph("Beside the baselines that the paper does not have:"), Bullets(sentences)]
        return Section("Findings", blocks)

    def _listed(self, found: list[Finding]) -> Bullets:
        return Bullets(
            [f"{finding.claim} {finding.evidence}".strip() for finding in found],
            [f"{finding.verdict.capitalize()}." for finding in found],
        )

    def _coverage(self) -> Section:
        expected = [d for d in self.published.distinct("authors_code", "dataset") if d != "mnist"]
        corrupted = [line.dataset for line in tables.lines_of(self.published, CORRUPTED)]
        coloured = self.published.distinct(CORRUPTED_COLOUR, "dataset")
        run = sum("lowrank-kfac" in self.measurements.methods(dataset) for dataset in corrupted)
        blocks: list[Block] = [
            Paragraph(
                f"The paper has {PAPER_SEEDS} seeds of each data set. Corrupted MNIST: {run} of "
                f"{counted(len(corrupted), 'corruption')} run; the corrupted pictures were generated, as the published "
                "ones cannot be had again."
            ),
            tables.overview(self.measurements, [*expected, "mnist", *corrupted, *coloured]),
            tables.notes(self.measurements),
        ]
        return Section("What was run, and what was cut", blocks)

    def _curves(self, dataset: str, name: str, panels: list[Panel], methods: tuple[str, ...]) -> Figure:
        largest = self.largest.get(dataset, math.inf)
        return figures.against_dimension(
            self.measurements, dataset, panels, methods, lambda s: on_grid(s, largest), name, dataset
        )

    def _figure_1(self) -> Section:
        drawn = []
        for dataset in self.clean:
            kl = Panel(self.measurements.divergence(dataset), "KL", logarithmic=True)
            drawn.append(self._curves(dataset, f"figure-1-{dataset}", [kl, Panel("log_trace", "log-trace")], DRAWN))
        missing = [dataset for dataset in FIGURE_1 if dataset not in self.clean]
        caption = (
            "Above the KL divergence from the full posterior, below the logarithm of the trace, against s. Bands are "
            "standard errors; points without a trace, or far below a ten-thousandth of the largest, are left out; "
            "curves end at the last s that all seeds reach."
        )
        blocks: list[Block] = [Figures("Key to all figures.", [figures.legend([*DRAWN, "map"])])]
        if drawn:
            blocks.append(Figures(caption, drawn))
        if missing:
            blocks.append(Paragraph(f"{tables.NOT_RUN.capitalize()}: {', '.join(missing)}."))
        for dataset in self.clean:
            largest = self.largest.get(dataset, math.inf)
            blocks.append(tables.divergences(self.measurements, dataset, (*FEASIBLE, OPTIMUM), largest))
        blocks.append(facts.ranks(self.measurements, self.published))
        return Section("Figure 1: faithfulness to the full posterior", blocks)

    def _figure_2(self) -> Section:
        title = "Figure 2: networks without a full posterior"
        missing = [dataset for dataset in large.SETS[:2] if dataset not in self.large]
        blocks: list[Block] = []
        if missing:
            blocks.append(Paragraph(f"{tables.NOT_RUN.capitalize()}: {', '.join(missing)}."))
        if not self.large:
            return Section(title, blocks)
        panel = [Panel("log_trace", "log-trace")]
        drawn = [self._curves(dataset, f"figure-2-{dataset}", panel, DRAWN) for dataset in self.large]
        caption = "The logarithm of the trace against s; the key is that of Figure 1. Below the frame: see the tables."
        blocks.append(Figures(caption, drawn))
        blocks += [large.traces(self.measurements, dataset) for dataset in self.large]
        text = (
            "No trace of a full posterior is known here, but it lies between two bounds, and with it the share that a "
            "subspace captures. The lower limit is certain; the upper one is the trace over that of the largest s."
        )
        shares = large.certified_shares(self.measurements, self.large)
        blocks += [Paragraph(text), shares if shares.rows else Paragraph(f"{tables.NOT_RUN.capitalize()}.")]
        blocks.append(large.accuracies(self.measurements, self.large))
        return Section(title, blocks)

    def _scores(self) -> Section:
        table = TABLE_1
        blocks: list[Block] = []
        for dataset in self.published.distinct(table, "dataset"):
            if dataset not in self.measurements.datasets:
                count = sum(self.published.tables[table]["dataset"] == dataset)
                blocks.append(Paragraph(f"{dataset}: {tables.NOT_RUN} ({counted(count, 'cell')} of the paper)."))
                continue
            lines = tables.lines_of(self.published, table, dataset)
            for metric in self.published.distinct(table, "metric"):
                caption = f"{dataset}, {tables.title(metric)}{large.cut(dataset, self.published)}"
                blocks.append(tables.beside_paper(self.measurements, self.published, table, metric, lines, caption))
        blocks.append(tables.agreement_table(self.measurements, self.published, self.compared))
        return Section("Table 1 and its extension", blocks)

    def _corrupted(self) -> Section:
        blocks: list[Block] = []
        for table in (CORRUPTED, "mnist_c_uq_eval"):
            lines = tables.lines_of(self.published, table)
            for metric in self.published.distinct(table, "metric"):
                caption = f"Corrupted MNIST, s = {lines[0].s}, {tables.title(metric)}"
                blocks.append(tables.beside_paper(self.measurements, self.published, table, metric, lines, caption))
        blocks += self._tenfold_traces()
        blocks += self._corrupted_baselines("mnist-c/", 100)
        cells = counted(len(self.published.tables[CORRUPTED_COLOUR]), "cell")
        if not any(dataset.startswith("cifar10-c/") for dataset in self.measurements.datasets):
            blocks.append(Paragraph(f"Corrupted CIFAR10 (Table 2 and its extension, {cells}): {tables.NOT_RUN}."))
            return Section("Corrupted data", blocks)
        for metric in self.published.distinct(CORRUPTED_COLOUR, "metric"):
            caption = f"Corrupted CIFAR10 (Table 2 and its extension), {tables.title(metric)}"
            lines = tables.lines_of(self.published, CORRUPTED_COLOUR)
            beside = tables.beside_paper(self.measurements, self.published, CORRUPTED_COLOUR, metric, lines, caption)
            blocks.append(beside)
        blocks += self._corrupted_baselines("cifar10-c/", 200)
        return Section("Corrupted data", blocks)

    def _tenfold_traces(self) -> list[Block]:
        """Compare the traces of corrupted MNIST as if ours were sums over ten times as many inputs."""
        lines = tables.lines_of(self.published, CORRUPTED)
        same, tenfold = (
            tables.agreement(self.measurements, self.published, CORRUPTED, "log_trace", lines, offset)
            for offset in (0.0, math.log(10))
        )
        if same is None or tenfold is None:
            return []
        text = (
            f"Of the log-traces, {same.within} of {same.tested} lie within two standard errors of the paper's, and "
            f"{tenfold.within} with ln 10 added to ours, as for sums over ten times as many inputs. The list of what "
            "differs says what this excludes."
        )
        return [Paragraph(text)]

    def _corrupted_baselines(self, prefix: str, s: int) -> list[Block]:
        datasets = [dataset for dataset in self.measurements.datasets if dataset.startswith(prefix)]
        found = [
            tables.corrupted_baselines(self.measurements, datasets, s, m) for m in ("nll", "ece", "brier") if datasets
        ]
        return [table for table in found if table.rows]

    def _likelihoods(self) -> Section:
        drawn = [
            self._curves(dataset, f"nll-{dataset}", [Panel("nll", "NLL")], (*DRAWN, "map"))
            for dataset in (*self.clean, *self.large)
        ]
        caption = "NLL on the test set (of cifar10, on a part of it); the key is that of Figure 1."
        return Section("NLL against s", [Figures(caption, drawn)])

    def _baselines(self) -> Section:
        text = (
            "All methods side by side, subspaces at the s nearest to 100 and at the largest. lowrankopt-ggn is built "
            "from the inputs it is judged on: a yardstick, not a method."
        )
        return Section(
            "Baselines",
            [Paragraph(text), *(tables.baselines(self.measurements, d) for d in (*self.clean, *self.large))],
        )

    def _beyond(self) -> Section:
        title = "Beyond the paper: KFAC outside of the subspace"
        datasets = [d for d in beyond.SETS if d in self.measurements.datasets]
        if not datasets:
            return Section(title, [Paragraph(f"{tables.NOT_RUN.capitalize()}.")])
        text = (
            "The posterior is exact in the subspace and KFAC outside of it; 'fitted kfac' has the weight of KFAC's "
            "curvature fitted to the full posterior on training inputs that were held back. Methods marked † need the "
            "exact curvature over all parameters: formed for these networks, so that they cost about as much as the "
            "full posterior; from its products with vectors where it does not fit. Own λ: the one with the "
            "best NLL on one half of the test set (on at most 5,000 of its outputs), scored on the other half, and the "
            "other way round. The optimum of Theorem 1 binds pure subspaces only."
        )
        blocks: list[Block] = [Paragraph(text), Paragraph(beyond.verdict(self.measurements, datasets))]
        blocks += [beyond.divergences(self.measurements, datasets, s) for s in COMPARED_DIMS]
        blocks.append(beyond.closed_gaps(self.measurements, datasets, COMPARED_DIMS[0]))
        blocks += [beyond.scores(self.measurements, dataset) for dataset in datasets]
        return Section(title, blocks)

    def _trace_criterion(self) -> Section:
        text = "ρ = 1 where a larger trace always goes with a smaller divergence."
        return Section(
            "The trace criterion",
            [
                Paragraph(text),
                tables.rank_correlations(self.measurements, self.clean, self.largest),
                tables.corrupted_rank_correlations(self.measurements, self.published),
            ],
        )

    def _bounds(self) -> Section:
        checks = [*trace_checks(self.measurements), divergence_check(self.measurements)]
        blocks: list[Block] = [tables.check_table(checks)]
        for check in checks:
            if check.violations:
                more = len(check.violations) - SHOWN_VIOLATIONS
                rest = [f"and {more} more"] if more > 0 else []
                blocks.append(Paragraph(f"Violated: {check.claim}"))
                blocks.append(Bullets([*check.violations[:SHOWN_VIOLATIONS], *rest]))
        return Section("Bounds", blocks)

    def _small_and_large(self) -> Section:
        title = "Small and large s on Red Wine"
        if "redwine" not in self.measurements.datasets:
            return Section(title, [Paragraph(f"{tables.NOT_RUN.capitalize()}.")])
        panels = [Panel("kl", "KL", logarithmic=True), Panel("log_trace", "log-trace")]
        subsets = (*(method for method in DRAWN if method.startswith("subset")), "full")
        drawn = [
            figures.against_dimension(
                self.measurements, "redwine", panels, methods, dims, f"redwine-{name}", f"redwine, {name} s"
            )
            for name, methods, dims in (("small", DRAWN, SMALL_DIM.__ge__), ("large", subsets, SMALL_DIM.__le__))
        ]
        caption = f"Left s up to {SMALL_DIM}, right subsets up to the largest s; the key is that of Figure 1."
        return Section(title, [Figures(caption, drawn)])

    def _dead_parameters(self) -> Section:
        blocks: list[Block] = [facts.dead_parameters(self.measurements, self.published)]
        paths = {d: self.folder / f"dead_parameters-{d}.npz" for d in ("enb", "california")}
        drawn = [figures.heat_map(path, dataset) for dataset, path in paths.items() if path.exists()]
        if drawn:
            caption = "Sensitivity of the outputs to every parameter, seed 0: dark where a parameter moves nothing."
            blocks.append(Figures(caption, drawn))
        missing = [dataset for dataset, path in paths.items() if not path.exists()]
        if missing:
            blocks.append(Paragraph(f"Heat map of {', '.join(missing)}: {tables.NOT_RUN}."))
        return Section("Dead parameters", blocks)

    def _prior(self) -> Section:
        return Section("Prior precision", [facts.prior_precisions(self.measurements, self.published)])

    def _costs(self) -> Section:
        blocks: list[Block] = [
            costs.of_methods(self.measurements),
            costs.ratios(self.measurements, self.published),
            costs.memory_load(self.published),
        ]
        large = self.folder / "scale.csv"
        if large.exists():
            blocks.append(costs.large_fits(large, self.published))
        return Section("Cost and memory", blocks)

    def _remarks(self) -> Section:
        """Return what differs from the paper by intent."""
        return Section("What differs from the paper, and why", [_bullets("findings.md")])


def _bullets(name: str, part: int = 0) -> Bullets:
    """Return the list in one part of a text file of the experiments; bold text at the start of an item is its title."""
    text = (TEXTS / name).read_text(encoding="utf-8").split("\n# ")[part]
    items = [" ".join(item.split()) for item in text.split("\n- ")[1:]]
    if not items[0].startswith("**"):
        return Bullets(items)
    leads, rest = zip(*(item.removeprefix("**").split("** ", 1) for item in items), strict=True)
    return Bullets(rest, leads)
