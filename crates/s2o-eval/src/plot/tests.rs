//! Every kind of plot in both formats: what is in the files, and that nothing is clipped or on top of another label.

use std::collections::HashSet;
use std::fs;
use std::io::BufReader;
use std::path::Path;

use regex::Regex;
use tempfile::TempDir;

use super::scene::Rect;
use super::*;

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

fn error_by_density() -> Lines {
    let series = |label: &str, scale: f64| Series {
        label: label.to_owned(),
        points: (1..=9).map(|i| f64::from(i) / 10.0).map(|x| (x, scale * (-5.0 * x).exp())).collect(),
        marks: true,
    };
    Lines {
        title: "Error at equal density, 32K tokens".to_owned(),
        x: Axis::linear("density"),
        y: Axis::log10("mean squared error"),
        series: vec![
            series("S2O", 1e-4),
            series("XAttention", 4e-3),
            series("FlexPrefill", 5e-3),
            series("sliding window & sink", 3e-2),
        ],
        levels: vec![Level { label: "bf16 rounding".to_owned(), y: 2e-6 }],
    }
}

fn speed_up_by_length() -> Lines {
    let points = |top: f64| (12..=17).map(|log| (2f64.powi(log), 1.0 + top * f64::from(log - 11) / 6.0)).collect();
    let series = |label: &str, top| Series { label: label.to_owned(), points: points(top), marks: false };
    Lines {
        title: "Speed-up over dense attention".to_owned(),
        x: Axis::log2("tokens"),
        y: Axis::linear("times dense"),
        series: vec![series("attention", 6.5), series("time to first token", 2.8)],
        levels: vec![Level { label: "dense".to_owned(), y: 1.0 }],
    }
}

fn passkeys() -> Heatmap {
    Heatmap {
        title: "Passkeys found".to_owned(),
        values: Matrix::new(5, 6, (0..30).map(|i| if i == 17 { f64::NAN } else { f64::from(i % 7) / 6.0 }).collect())
            .expect("a matrix"),
        row_labels: strings(&["0 %", "25 %", "50 %", "75 %", "100 %"]),
        column_labels: strings(&["4K", "8K", "16K", "32K", "64K", "128K"]),
        rows: "depth".to_owned(),
        columns: "tokens".to_owned(),
        unit: "share found".to_owned(),
        scale: Scale::Linear,
        range: Some((0.0, 1.0)),
        decimals: 2,
    }
}

fn density_by_head() -> Heatmap {
    let (layers, heads) = (32, 32);
    let number = |count: usize| (0..count).map(|i| i.to_string()).collect();
    Heatmap {
        title: "Density".to_owned(),
        values: Matrix::new(layers, heads, (0..1024).map(|i| 0.01 + f64::from(i * 37 % 101) / 101.0).collect())
            .expect("a matrix"),
        row_labels: number(layers),
        column_labels: number(heads),
        rows: "layer".to_owned(),
        columns: "head".to_owned(),
        unit: "density".to_owned(),
        scale: Scale::Log10,
        range: None,
        decimals: 2,
    }
}

fn times() -> Bars {
    let bar = |label: &str, selection, attention| Bar { label: label.to_owned(), parts: vec![selection, attention] };
    Bars {
        title: "Time of one layer at 128K".to_owned(),
        quantity: "milliseconds".to_owned(),
        parts: strings(&["selection", "attention"]),
        bars: vec![
            bar("dense", 0.0, 320.0),
            bar("S2O", 9.0, 33.5),
            bar("XAttention", 41.0, 60.2),
            bar("MInference", 80.0, 55.0),
        ],
        decimals: 1,
    }
}

fn attention(title: &str) -> AttentionMap {
    let cells = 64;
    let probability = |row: usize, column: usize| match row.cmp(&column) {
        std::cmp::Ordering::Less => f64::NAN,
        _ if column == 0 => 0.3,
        _ => (1.0 + (row - column) as f64).powi(-2) / (1.0 + (column % 7) as f64),
    };
    let values = (0..cells * cells).map(|i| probability(i / cells, i % cells)).collect();
    let tile = |query: usize, key: usize| Tile { queries: query..query + 512, keys: key..key + 512 };
    AttentionMap {
        title: title.to_owned(),
        probabilities: Matrix::new(cells, cells, values).expect("a matrix"),
        queries: 0..4096,
        keys: 0..4096,
        query_label: "query".to_owned(),
        key_label: "key".to_owned(),
        tiles: (0..8).flat_map(|i| [tile(512 * i, 512 * i), tile(512 * i, 0)]).collect(),
    }
}

fn four_maps() -> AttentionMaps {
    AttentionMaps {
        title: "Layer 3, head 1".to_owned(),
        maps: ["(a) original", "(b) permuted by PBS", "(c) ranked by S2O", "(d) queries permuted too"]
            .map(attention)
            .into(),
        columns: 2,
        unit: "attention probability".to_owned(),
        floor: Some(1e-6),
    }
}

/// Writes a plot of 1200 x 800 pixels and checks what holds for all of them; returns the SVG.
fn checked(plot: &dyn Plot, texts: &[&str]) -> String {
    let directory = TempDir::new().expect("a temporary directory");
    let files = Figure::new(1200, 800).expect("a size").write(plot, directory.path(), "plot").expect("written");
    assert!(colours(&files.png, (1200, 800)) > 16);
    let svg = fs::read_to_string(&files.svg).expect("an SVG");
    assert!(svg.starts_with("<svg width=\"1200\" height=\"800\" viewBox=\"0 0 4800 3200\""), "{}", &svg[..80]);
    let labels = labels(&svg);
    for text in texts {
        assert!(labels.iter().any(|label| label.0 == *text), "{text} in {labels:?}");
    }
    for (i, (text, inner)) in labels.iter().enumerate() {
        let inside = inner.left >= 0.0 && inner.top >= 0.0 && inner.right <= 4800.0 && inner.bottom <= 3200.0;
        assert!(inside, "{text} is clipped: {inner:?}");
        for (other, outer) in &labels[..i] {
            let apart = inner.left >= outer.right
                || outer.left >= inner.right
                || inner.top >= outer.bottom
                || outer.top >= inner.bottom;
            assert!(apart, "{text} is on {other}: {inner:?} {outer:?}");
        }
    }
    svg
}

/// The number of colours of a PNG of that size.
fn colours(path: &Path, size: (u32, u32)) -> usize {
    let file = BufReader::new(fs::File::open(path).expect("a PNG"));
    let mut reader = png::Decoder::new(file).read_info().expect("a PNG");
    let mut pixels = vec![0; reader.output_buffer_size()];
    let info = reader.next_frame(&mut pixels).expect("pixels");
    assert_eq!((info.width, info.height, info.color_type), (size.0, size.1, png::ColorType::Rgb));
    pixels.chunks_exact(3).collect::<HashSet<_>>().len()
}

/// What hangs below the base line, in em.
const DESCENT: f64 = 0.2;

/// The texts of an SVG and the boxes that they take, in units of its view box.
fn labels(svg: &str) -> Vec<(String, Rect)> {
    let text = Regex::new(r"(?s)<text ([^>]*)>\n(.*?)\n</text>").expect("an expression");
    let attribute = |attributes: &str, name: &str| {
        let expression = Regex::new(&format!("{name}=\"([^\"]*)\"")).expect("an expression");
        expression.captures(attributes).map(|found| found[1].to_owned()).unwrap_or_default()
    };
    let read = |captures: regex::Captures| {
        let (attributes, content) = (&captures[1], captures[2].replace("&amp;", "&"));
        assert!(attribute(attributes, "font-family").ends_with("sans-serif"), "{attributes}");
        let number = |name| attribute(attributes, name).parse::<f64>().expect("a number");
        let (x, y, em) = (number(" ?x"), number(" y"), number("font-size"));
        let width = typeface::width(&content, em).expect("a width");
        let from = match attribute(attributes, "text-anchor").as_str() {
            "start" => 0.0,
            "middle" => -0.5 * width,
            _ => -width,
        };
        // The anchor is the top: capitals begin a little below, and end a little above the descent.
        let (top, bottom) = ((0.76 - typeface::CAP_HEIGHT) * em, (0.76 + DESCENT) * em);
        let rect = if attributes.contains("rotate(270") {
            Rect { left: x + top, right: x + bottom, top: y - from - width, bottom: y - from }
        } else {
            Rect { left: x + from, right: x + from + width, top: y + top, bottom: y + bottom }
        };
        (content, rect)
    };
    text.captures_iter(svg).map(read).collect()
}

#[test]
fn lines_have_axes_and_names() {
    let texts = ["density", "mean squared error", "S2O", "sliding window & sink", "bf16 rounding", "0.01", "1e-4"];
    let svg = checked(&error_by_density(), &texts);
    assert!(svg.contains("<polyline") && svg.contains("<polygon") && svg.contains("<circle"));
    checked(&speed_up_by_length(), &["tokens", "4K", "128K", "attention", "time to first token", "dense"]);
}

#[test]
fn many_series_with_long_names_stay_inside() {
    let mut plot = error_by_density();
    let long = "a name that is far too long to stand beside the data in full, and goes on";
    plot.series = (0..16).map(|i| Series { label: format!("{i} {long}"), ..plot.series[0].clone() }).collect();
    plot.title = long.repeat(3);
    plot.levels.clear();
    let svg = checked(&plot, &[]);
    assert_eq!(svg.matches("…\n").count(), 17);
}

#[test]
fn heatmaps_print_numbers_only_where_they_fit() {
    checked(&passkeys(), &["0.17", "1.00", "25 %", "128K", "depth", "tokens", "share found", "Passkeys found"]);
    let svg = checked(&density_by_head(), &["layer", "head", "0", "30", "density"]);
    assert!(!labels(&svg).iter().any(|label| label.0 == "0.38"));
}

#[test]
fn bars_say_parts_and_totals() {
    checked(&times(), &["selection", "attention", "dense", "320.0", "42.5", "41.0", "60.2", "milliseconds"]);
}

#[test]
fn attention_maps_outline_tiles() {
    let svg = checked(&attention("one head"), &["one head", "query", "key", "2K", "4K", "attention probability"]);
    assert!(svg.contains("stroke=\"#D55E00\""), "no outline");
    let none = checked(&AttentionMap { tiles: Vec::new(), ..attention("one head") }, &[]);
    assert!(!none.contains("stroke=\"#D55E00\""));
    // Greys besides paper, ink and lines: cells outside the tiles.
    let greys = |svg: &str| {
        let fills = Regex::new("fill=\"#([0-9A-F]{2})([0-9A-F]{2})([0-9A-F]{2})\"").expect("an expression");
        let all = fills.captures_iter(svg).filter(|fill| fill[1] == fill[2] && fill[2] == fill[3]);
        all.map(|fill| fill[1].to_owned()).collect::<HashSet<_>>().len()
    };
    assert!(greys(&none) <= 2 && greys(&svg) > 8, "{} and {}", greys(&none), greys(&svg));
    checked(&four_maps(), &["Layer 3, head 1", "(a) original", "(d) queries permuted too", "1e-6"]);
}

#[test]
fn a_chunk_of_queries_keeps_its_tokens() {
    let map = AttentionMap { queries: 4096..5120, keys: 0..5120, tiles: Vec::new(), ..attention("chunk") };
    checked(&map, &["4K", "5K", "0"]);
}

#[test]
fn pictures_come_in_the_size_asked_for() {
    let directory = TempDir::new().expect("a temporary directory");
    let nested = directory.path().join("a/b");
    for size in [(400, 300), (1600, 500), (500, 900)] {
        let figure = Figure::new(size.0, size.1).expect("a size");
        for (plot, name) in
            [(&speed_up_by_length() as &dyn Plot, "lines"), (&passkeys(), "heatmap"), (&times(), "bars")]
        {
            let files = figure.write(plot, &nested, name).expect("written");
            assert!(colours(&files.png, size) > 16);
        }
    }
    for (width, height) in [(0, 0), (159, 800), (800, 3001), (u32::MAX, u32::MAX)] {
        assert!(matches!(Figure::new(width, height), Err(PlotError::Size { .. })));
    }
}

#[test]
fn what_cannot_be_written_is_said() {
    let directory = TempDir::new().expect("a temporary directory");
    let figure = Figure::new(400, 300).expect("a size");
    for name in ["", "..", "a/b", "/a"] {
        assert!(matches!(figure.write(&times(), directory.path(), name), Err(PlotError::Name { .. })), "{name}");
    }
    let file = directory.path().join("file");
    fs::write(&file, "").expect("written");
    assert!(matches!(figure.write(&times(), &file, "plot"), Err(PlotError::Write { .. })));
    fs::create_dir(directory.path().join("plot.png")).expect("made");
    assert!(matches!(figure.write(&times(), directory.path(), "plot"), Err(PlotError::Write { .. })));
}

/// Draws without writing.
fn drawn(plot: &dyn Plot) -> Result<(), PlotError> {
    let directory = TempDir::new().expect("a temporary directory");
    Figure::new(600, 400).expect("a size").write(plot, directory.path(), "plot").map(|_| ())
}

#[test]
fn points_that_an_axis_cannot_show_leave_a_gap() {
    let mut plot = error_by_density();
    plot.series[0].points[4].1 = 0.0;
    plot.series[1].points[2] = (f64::NAN, 1e-3);
    plot.series[2].points[0].1 = f64::INFINITY;
    plot.series[3].points.clear();
    let svg = checked(&plot, &["S2O", "sliding window & sink"]);
    // The first two have two parts each, the third one, and each a sample in the legend.
    let parts = ["#0072B2", "#D55E00", "#009E73"].map(|colour| svg.matches(&format!("stroke=\"{colour}\"")).count());
    assert_eq!(parts, [3, 3, 2]);

    for points in [vec![], vec![(f64::NAN, 1.0)], vec![(1.0, 0.0), (2.0, -3.0)]] {
        let series = vec![Series { label: "none".to_owned(), points, marks: true }];
        let nothing = Lines { series, levels: Vec::new(), ..error_by_density() };
        assert!(matches!(drawn(&nothing), Err(PlotError::NoData { .. })));
    }
    let level = Level { label: "zero".to_owned(), y: 0.0 };
    assert!(matches!(
        drawn(&Lines { levels: vec![level], ..error_by_density() }),
        Err(PlotError::Value { got: 0.0, .. })
    ));
}

#[test]
fn degenerate_lines_are_drawn() {
    let single = |points: &[(f64, f64)]| Lines {
        series: vec![Series { label: "one".to_owned(), points: points.to_vec(), marks: false }],
        levels: Vec::new(),
        ..speed_up_by_length()
    };
    let points: [&[(f64, f64)]; 5] = [
        &[(4096.0, 2.0)],
        &[(4096.0, 0.0), (8192.0, 0.0)],
        &[(1.0, -1e100), (1e99, 1e100)],
        &[(4096.0, 1.0), (4096.0, 3.0), (4096.0, 3.0)],
        &[(4096.0, 1e-300), (8192.0, 5e-324)],
    ];
    for points in points {
        checked(&single(points), &["one"]);
    }
    checked(&Lines { title: String::new(), x: Axis::default(), y: Axis::default(), ..single(&[(1.0, 1.0)]) }, &["one"]);
}

#[test]
fn matrices_must_fit_their_labels_and_have_a_value() {
    assert!(matches!(Matrix::new(2, 3, vec![0.0; 5]), Err(PlotError::Count { expected: 6, got: 5, .. })));
    assert!(Matrix::new(usize::MAX, 2, Vec::new()).is_err());
    let few = Heatmap { row_labels: strings(&["one"]), ..passkeys() };
    assert!(matches!(drawn(&few), Err(PlotError::Count { what: "row labels", expected: 5, got: 1 })));
    let with = |values| Heatmap { values: Matrix::new(5, 6, values).expect("a matrix"), ..passkeys() };
    assert!(matches!(drawn(&with(vec![f64::NAN; 30])), Err(PlotError::NoData { .. })));
    let infinite = Heatmap { range: Some((0.0, f64::INFINITY)), ..passkeys() };
    assert!(matches!(drawn(&infinite), Err(PlotError::Value { .. })));
    let empty = Matrix::new(0, 0, Vec::new()).expect("a matrix");
    let empty = Heatmap { values: empty, row_labels: Vec::new(), column_labels: Vec::new(), ..passkeys() };
    assert!(matches!(drawn(&empty), Err(PlotError::NoData { .. })));

    checked(&Heatmap { range: None, ..with(vec![0.5; 30]) }, &["0.50"]);
    let mut one_left = vec![f64::INFINITY; 30];
    one_left[3] = 1e100;
    checked(&Heatmap { range: None, ..with(one_left) }, &["1.0e100"]);
}

#[test]
fn bars_refuse_what_has_no_length() {
    for got in [-1.0, f64::NAN, f64::INFINITY] {
        let mut bars = times();
        bars.bars[1].parts[0] = got;
        assert!(matches!(drawn(&bars), Err(PlotError::Value { .. })));
    }
    assert!(matches!(drawn(&Bars::default()), Err(PlotError::NoData { .. })));
    let mut bars = times();
    bars.bars[2].parts.pop();
    assert!(matches!(drawn(&bars), Err(PlotError::Count { expected: 2, got: 1, .. })));
    let crowd = Bars { bars: vec![times().bars[0].clone(); 500], ..times() };
    assert!(matches!(drawn(&crowd), Err(PlotError::NoRoom { direction: "height", .. })));
    let mut zeros = times();
    zeros.bars.iter_mut().for_each(|bar| bar.parts.fill(0.0));
    checked(&zeros, &["0.0"]);
}

#[test]
fn attention_maps_refuse_what_has_no_mass() {
    let nothing = Matrix::new(2, 2, vec![0.0, f64::NAN, 0.0, 0.0]).expect("a matrix");
    assert!(matches!(
        drawn(&AttentionMap { probabilities: nothing, ..attention("") }),
        Err(PlotError::NoData { got: 4, .. })
    ));
    let tokens = AttentionMap { keys: 5..5, ..attention("") };
    assert!(matches!(drawn(&tokens), Err(PlotError::NoData { what: "keys", .. })));
    assert!(matches!(drawn(&AttentionMaps { columns: 0, ..four_maps() }), Err(PlotError::NoData { .. })));
    assert!(matches!(drawn(&AttentionMaps { maps: Vec::new(), ..four_maps() }), Err(PlotError::NoData { .. })));
    let floor = AttentionMaps { floor: Some(0.0), ..four_maps() };
    assert!(matches!(drawn(&floor), Err(PlotError::Value { got: 0.0, .. })));

    let mut outside = attention("outside");
    outside.tiles.push(Tile { queries: 9000..9999, keys: 5..5 });
    outside.tiles.push(Tile { queries: 4000..9999, keys: 4000..usize::MAX });
    checked(&outside, &["outside"]);
}
