//! Every kind of plot: no label is clipped or overlaps another, and both files hold the picture.

use std::collections::HashSet;
use std::fs;

use tempfile::TempDir;
use tiny_skia::Pixmap;

use super::palette::OUTLINE;
use super::scene::{Anchor, Rect, Scene};
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
        series: [("S2O", 1e-4), ("XAttention", 4e-3), ("FlexPrefill", 5e-3), ("sliding window & sink", 3e-2)]
            .map(|(label, scale)| series(label, scale))
            .to_vec(),
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
    let values = (0..30).map(|i| if i == 17 { f64::NAN } else { f64::from(i % 7) / 6.0 }).collect();
    Heatmap {
        title: "Passkeys found".to_owned(),
        values: Matrix::new(5, 6, values).expect("a matrix"),
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
    let values = (0..1024).map(|i| 0.01 + f64::from(i * 37 % 101) / 101.0).collect();
    let numbers: Vec<String> = (0..32).map(|i| i.to_string()).collect();
    Heatmap {
        title: "Density".to_owned(),
        values: Matrix::new(32, 32, values).expect("a matrix"),
        row_labels: numbers.clone(),
        column_labels: numbers,
        rows: "layer".to_owned(),
        columns: "head".to_owned(),
        unit: "density".to_owned(),
        scale: Scale::Log10,
        range: None,
        ..passkeys()
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

fn maps(maps: impl Into<Vec<AttentionMap>>, floor: Option<f64>) -> AttentionMaps {
    let (title, unit) = ("Layer 3, head 1".to_owned(), "attention probability".to_owned());
    AttentionMaps { title, maps: maps.into(), columns: 2, unit, floor }
}

fn one_map(map: AttentionMap) -> AttentionMaps {
    maps([map], None)
}

fn four_maps() -> AttentionMaps {
    let titles = ["(a) original", "(b) permuted by PBS", "(c) ranked by S2O", "(d) queries permuted too"];
    maps(titles.map(attention), Some(1e-6))
}

/// Draws a plot of 1200 x 800 pixels and checks its labels, among them `texts`.
fn checked(plot: &dyn Plot, texts: &[&str]) -> Scene {
    let scene = drawn(plot).expect("drawn");
    let labels = labels(&scene);
    for text in texts {
        assert!(labels.iter().any(|label| label.0 == *text), "{text} in {labels:?}");
    }
    for (i, (text, inner)) in labels.iter().enumerate() {
        let inside = inner.left >= 0.0 && inner.top >= 0.0 && inner.right <= 1200.0 && inner.bottom <= 800.0;
        assert!(inside, "{text} is clipped: {inner:?}");
        for (other, outer) in &labels[..i] {
            let is_beside = inner.left >= outer.right || outer.left >= inner.right;
            let is_apart = is_beside || inner.top >= outer.bottom || outer.top >= inner.bottom;
            assert!(is_apart, "{text} is on {other}: {inner:?} {outer:?}");
        }
    }
    scene
}

fn drawn(plot: &dyn Plot) -> Result<Scene, PlotError> {
    Figure::new(1200, 800).expect("a size").scene(plot)
}

fn refused(plot: &dyn Plot) -> String {
    drawn(plot).expect_err("an error").to_string()
}

/// The texts of a picture and the boxes that they cover.
fn labels(scene: &Scene) -> Vec<(String, Rect)> {
    let label = |line: &str| {
        let (attributes, content) = line.strip_prefix("<text ")?.strip_suffix("</text>")?.split_once('>')?;
        let number = |name: &str| {
            let (_, value) = attributes.split_once(&format!("{name}=\""))?;
            value.split('"').next()?.parse::<f64>().ok()
        };
        let (x, y, em) = (number("x")?, number("y")?, number("font-size")?);
        let content = content.replace("&lt;", "<").replace("&amp;", "&");
        let width = typeface::width(&content, em);
        let from = match attributes {
            middle if middle.contains("\"middle\"") => -0.5 * width,
            end if end.contains("\"end\"") => -width,
            _ => 0.0,
        };
        // From the top of the capitals to the descenders.
        let (above, below) = (typeface::CAP_HEIGHT * em, 0.2 * em);
        let rect = match attributes.contains("rotate(-90") {
            true => Rect { left: x - above, right: x + below, top: y - from - width, bottom: y - from },
            false => Rect { left: x + from, right: x + from + width, top: y - above, bottom: y + below },
        };
        Some((content, rect))
    };
    scene.svg.lines().filter_map(label).collect()
}

fn count(scene: &Scene, part: &str) -> usize {
    scene.svg.matches(part).count()
}

#[test]
fn lines_have_axes_and_names() {
    let texts = ["density", "mean squared error", "S2O", "sliding window & sink", "bf16 rounding", "0.01", "1e-4"];
    let scene = checked(&error_by_density(), &texts);
    assert_eq!(count(&scene, "<circle "), 10, "9 points and the legend");
    assert_eq!(count(&scene, " stroke-dasharray="), 2, "the level");
}

#[test]
fn many_series_with_long_names_stay_inside() {
    let mut plot = error_by_density();
    let long = "a name that is far too long to stand next to the data in full, and goes on";
    plot.series = (0..16).map(|i| Series { label: format!("{i} {long}"), ..plot.series[0].clone() }).collect();
    plot.title = long.repeat(3);
    plot.levels.clear();
    let labels = labels(&checked(&plot, &[]));
    assert_eq!(labels.iter().filter(|label| label.0.ends_with('…')).count(), 17);
}

#[test]
fn heatmaps_print_numbers_only_where_they_fit() {
    checked(&passkeys(), &["0.17", "1.00", "25 %", "128K", "depth", "tokens", "share found", "Passkeys found"]);
    let scene = checked(&density_by_head(), &["layer", "head", "0", "30", "density"]);
    assert!(!labels(&scene).iter().any(|label| label.0 == "0.38"));
}

#[test]
fn attention_maps_outline_tiles() {
    let outline = format!(" stroke=\"{OUTLINE}\"");
    let texts = ["one head", "query", "key", "2K", "4K", "attention probability"];
    let map = checked(&one_map(attention("one head")), &texts);
    assert!(count(&map, &outline) > 8);
    let whole = checked(&one_map(AttentionMap { tiles: Vec::new(), ..attention("one head") }), &[]);
    assert_eq!(count(&whole, &outline), 0);
    // Cells outside the tiles, after the background.
    let greys = |scene: &Scene| {
        let fills = scene.svg.lines().filter(|line| line.starts_with("<rect ")).skip(1);
        let colours = fills.filter_map(|line| line.split_once("fill=\"#").map(|(_, colour)| colour));
        colours.filter(|colour| colour[..2] == colour[2..4] && colour[2..4] == colour[4..6]).count()
    };
    assert!(greys(&whole) == 0 && greys(&map) > 64, "{} and {}", greys(&whole), greys(&map));
    checked(&four_maps(), &["Layer 3, head 1", "(a) original", "(d) queries permuted too", "1e-6"]);
}

#[test]
fn numbers_and_lengths_are_labels() {
    checked(&speed_up_by_length(), &["tokens", "4K", "128K", "attention", "time to first token", "dense"]);
    checked(&times(), &["selection", "attention", "dense", "320.0", "42.5", "41.0", "60.2", "milliseconds"]);
    let chunk = AttentionMap { queries: 4096..5120, keys: 0..5120, tiles: Vec::new(), ..attention("chunk") };
    checked(&one_map(chunk), &["4K", "5K", "0"]);
}

#[test]
fn both_files_hold_the_picture_in_the_size_asked_for() {
    let directory = TempDir::new().expect("a temporary directory");
    let nested = directory.path().join("a/b");
    let plots: [(&dyn Plot, &str); 4] = [
        (&error_by_density(), "sliding window &amp; sink"),
        (&passkeys(), "Passkeys found"),
        (&times(), "MInference"),
        (&four_maps(), "(c) ranked by S2O"),
    ];
    for (width, height) in [(800, 600), (1600, 900), (900, 1100)] {
        for (plot, text) in plots {
            let files = Figure::new(width, height).expect("a size").write(plot, &nested, "plot").expect("written");
            let pixels = Pixmap::load_png(&files.png).expect("a PNG");
            assert_eq!((pixels.width(), pixels.height()), (width, height));
            let colours: HashSet<_> =
                pixels.pixels().iter().map(|pixel| (pixel.red(), pixel.green(), pixel.blue())).collect();
            assert!(colours.len() > 64, "{text}: {} colours", colours.len());
            let svg = fs::read_to_string(&files.svg).expect("an SVG");
            let size = format!(" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\"");
            let holds = svg.contains(&size) && svg.contains(&format!(">{text}</text>\n")) && svg.ends_with("</svg>\n");
            assert!(holds, "{svg}");
        }
    }
    for (width, height) in [(0, 0), (159, 800), (800, 3001), (u32::MAX, u32::MAX)] {
        assert!(matches!(Figure::new(width, height), Err(PlotError::WrongInput { what: "picture", .. })));
    }
}

#[test]
fn text_is_drawn_where_its_box_is() {
    let mut scene = Scene::new(400, 300);
    scene.label("xMMMMx", 200.0, 100.0, Anchor::Middle);
    scene.label_upwards("xMMMMx", 40.0, 200.0);
    let (pixels, boxes) = (&scene.pixels, labels(&scene));
    for (i, pixel) in pixels.pixels().iter().enumerate().filter(|(_, pixel)| pixel.red() < 128) {
        let (x, y) = ((i % 400) as f64, (i / 400) as f64);
        let is_in = |rect: &Rect| x >= rect.left - 1.0 && x <= rect.right && y >= rect.top - 1.0 && y <= rect.bottom;
        assert!(boxes.iter().any(|(_, rect)| is_in(rect)), "{x}, {y}: {pixel:?} outside {boxes:?}");
    }
    for (text, rect) in &boxes {
        let dark = |x: f64, y: f64| pixels.pixel(x as u32, y as u32).is_some_and(|pixel| pixel.red() < 128);
        let (x, y) = (0.5 * (rect.left + rect.right), 0.5 * (rect.top + rect.bottom));
        let is_drawn = (-12..12).any(|d| dark(x + f64::from(d), y - 2.0) || dark(x, y + f64::from(d)));
        assert!(is_drawn, "{text} is not at {x}, {y}");
    }
}

#[test]
fn files_that_cannot_be_written_are_named() {
    let directory = TempDir::new().expect("a temporary directory");
    let figure = Figure::new(400, 300).expect("a size");
    for name in ["", "..", "a/b", "/a"] {
        let error = figure.write(&times(), directory.path(), name).expect_err("an error").to_string();
        assert_eq!(error, format!("picture name: expected a file name without its extension, got {name:?}"));
    }
    let file = directory.path().join("file");
    fs::write(&file, "").expect("written");
    assert!(matches!(figure.write(&times(), &file, "plot"), Err(PlotError::Write { .. })));
    fs::create_dir(directory.path().join("plot.png")).expect("made");
    assert!(matches!(figure.write(&times(), directory.path(), "plot"), Err(PlotError::Write { .. })));
}

#[test]
fn points_that_an_axis_cannot_show_leave_a_gap() {
    let mut plot = error_by_density();
    plot.series[0].points[4].1 = 0.0;
    plot.series[1].points[2] = (f64::NAN, 1e-3);
    plot.series[2].points[0].1 = f64::INFINITY;
    plot.series[3].points.clear();
    let scene = checked(&plot, &["S2O", "sliding window & sink"]);
    // The first two series have two parts each, the third has one. Each has a sample in the legend.
    let parts = [0, 1, 2].map(|series| count(&scene, &format!(" stroke=\"{}\"", palette::series(series))));
    assert_eq!(parts, [3, 3, 2]);

    for points in [vec![], vec![(f64::NAN, 1.0)], vec![(1.0, 0.0), (2.0, -3.0)]] {
        let series = vec![Series { label: "none".to_owned(), points, marks: true }];
        let nothing = Lines { series, levels: Vec::new(), ..error_by_density() };
        assert!(refused(&nothing).starts_with("series: expected a point that both axes can show, got none among "));
    }
    let levels = vec![Level { label: "zero".to_owned(), y: 0.0 }];
    assert_eq!(refused(&Lines { levels, ..error_by_density() }), "level: expected a finite number above 0, got 0");
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
    let error = Matrix::new(2, 3, vec![0.0; 5]).expect_err("an error").to_string();
    assert_eq!(error, "values of the matrix: expected 6, got 5");
    assert!(Matrix::new(usize::MAX, 2, Vec::new()).is_err());
    assert_eq!(refused(&Heatmap { row_labels: strings(&["one"]), ..passkeys() }), "row labels: expected 5, got 1");
    let with = |values| Heatmap { values: Matrix::new(5, 6, values).expect("a matrix"), ..passkeys() };
    let nothing = "matrix: expected a value that the colour scale can show, got none among ";
    assert_eq!(refused(&with(vec![f64::NAN; 30])), format!("{nothing}30"));
    assert!(refused(&Heatmap { range: Some((0.0, f64::INFINITY)), ..passkeys() }).starts_with("colour range: "));
    let empty = Matrix::new(0, 0, Vec::new()).expect("a matrix");
    let empty = Heatmap { values: empty, row_labels: Vec::new(), column_labels: Vec::new(), ..passkeys() };
    assert_eq!(refused(&empty), format!("{nothing}0"));

    checked(&Heatmap { range: None, ..with(vec![0.5; 30]) }, &["0.50"]);
    let mut one_left = vec![f64::INFINITY; 30];
    one_left[3] = 1e100;
    checked(&Heatmap { range: None, ..with(one_left) }, &["1.0e100"]);
}

#[test]
fn bars_without_a_length_are_refused() {
    for got in [-1.0, f64::NAN, f64::INFINITY] {
        let mut bars = times();
        bars.bars[1].parts[0] = got;
        assert_eq!(refused(&bars), format!("bar: expected a finite number that is not below 0, got {got}"));
    }
    assert_eq!(refused(&Bars::default()), "bars: expected a bar and a part, got none");
    let mut bars = times();
    bars.bars[2].parts.pop();
    assert_eq!(refused(&bars), "parts of a bar: expected 2, got 1");
    let crowd = Bars { bars: vec![times().bars[0].clone(); 500], ..times() };
    assert!(refused(&crowd).contains(" pixels of height for the data, got "));
    let mut zeros = times();
    zeros.bars.iter_mut().for_each(|bar| bar.parts.fill(0.0));
    checked(&zeros, &["0.0"]);
}

#[test]
fn attention_maps_without_mass_are_refused() {
    let nothing = Matrix::new(2, 2, vec![0.0, f64::NAN, 0.0, 0.0]).expect("a matrix");
    let nothing = AttentionMap { probabilities: nothing, ..attention("") };
    assert_eq!(refused(&one_map(nothing)), "attention map: expected a probability above 0, got none among 4");
    let no_keys = AttentionMap { keys: 5..5, ..attention("") };
    assert_eq!(refused(&one_map(no_keys)), "keys: expected at least one token, got 0");
    assert!(refused(&AttentionMaps { columns: 0, ..four_maps() }).starts_with("columns of attention maps: "));
    assert!(refused(&AttentionMaps { maps: Vec::new(), ..four_maps() }).starts_with("attention map: "));
    assert!(refused(&AttentionMaps { floor: Some(0.0), ..four_maps() }).starts_with("floor of the colours: "));

    let mut outside = attention("outside");
    outside.tiles.push(Tile { queries: 9000..9999, keys: 5..5 });
    outside.tiles.push(Tile { queries: 4000..9999, keys: 4000..usize::MAX });
    checked(&one_map(outside), &["outside"]);
}
