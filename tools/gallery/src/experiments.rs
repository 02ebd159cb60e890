//! `time-split`, `matched-speed`, `tau-and-segment` and `components`: means over layers, from the experiments of the
//! same names.

use anyhow::Result;
use s2o_eval::experiment::components::ComponentRow;
use s2o_eval::experiment::matched_speed::SpeedRow;
use s2o_eval::experiment::tau_and_segment::GridRow;
use s2o_eval::experiment::time_split::TimeRow;
use s2o_eval::method::{DENSE, MethodSpec, find};
use s2o_eval::metrics::median;
use s2o_eval::report::table;
use s2o_plot::{Axis, Level, Lines, Series};

use crate::layers::{Experiment, Group, Key, Setting};
use crate::methods_by_time::phases;
use crate::rows::ascending;
use crate::section::Section;
use crate::text::{error, pivot, share, slug, three_digits, tokens, with_unit};

pub const TIME_SPLIT: Experiment<TimeRow> = Experiment {
    name: "time-split",
    columns: "method, layer, tokens, selection_seconds, attention_seconds, dense_seconds, speed_up, density, \
              mse, rel_l1",
    intro: "Times in milliseconds, means over the layers; speed-up is that over our dense attention.",
    is_by_method: false,
    key: |row| Key::new(&row.method, format!("`{}`", row.method), row.layer, row.tokens),
    render: time_split,
};

fn time_split(group: &Group<TimeRow>, section: &mut Section) -> Result<String> {
    let header = ["method", "selection", "attention", "whole", "density", "MSE", "relative L1", "speed-up"];
    let phases_of = |own: &Setting<TimeRow>| {
        [own.milliseconds(|row| row.selection_seconds), own.milliseconds(|row| row.attention_seconds)]
    };
    let dense_of = |own: &Setting<TimeRow>| own.milliseconds(|row| row.dense_seconds);
    let line = |own: &Setting<TimeRow>| {
        let [selection, attention] = phases_of(own);
        let whole = selection + attention;
        vec![
            own.row().method.clone(),
            three_digits(selection),
            three_digits(attention),
            three_digits(whole),
            share(own.mean(|row| row.density), 3),
            error(own.mean(|row| row.mse)),
            share(own.mean(|row| row.rel_l1), 4),
            three_digits(dense_of(own) / whole),
        ]
    };
    // Time of dense attention, measured with the last method, unless dense is one of the methods.
    let is_method = group.settings.iter().any(|own| own.row().method == DENSE);
    let dense = group.settings.last().filter(|_| !is_method).map(dense_of);
    let exact = dense.map(|ms| {
        let cells = [DENSE, "-", "-", &three_digits(ms), "1.000", "-", "-", "1"];
        cells.map(str::to_owned).to_vec()
    });
    let bars = group.settings.iter().map(|own| (own.row().method.as_str(), phases_of(own)));
    phases(section, "time-split", group.tokens, bars.chain(dense.map(|ms| (DENSE, [0.0, ms]))))?;
    Ok(table(&header, group.settings.iter().map(line).chain(exact)))
}

pub const MATCHED_SPEED: Experiment<SpeedRow> = Experiment {
    name: "matched-speed",
    columns: "method, value, layer, tokens, density, block_density, seconds, selection_seconds, block_seconds, \
              dense_seconds, ratio",
    intro: "Times in milliseconds, means over the layers; the whole has the selection in it, and nothing chooses the \
            random blocks. Ratio is blocks over whole, speed-up dense over whole.",
    is_by_method: true,
    key: |row| {
        let value = row.value.map(|value| format!(" with {} {value}", option(&row.method))).unwrap_or_default();
        Key::new(&row.method, format!("`{}`{value}", row.method), row.layer, row.tokens)
    },
    render: matched_speed,
};

/// The option that trades error for density. Rows hold only its value.
fn option(method: &str) -> &'static str {
    let spec: Option<MethodSpec> = method.parse().ok();
    let knob = spec.and_then(|spec| find(spec.name()).ok()?.knob);
    knob.map_or("value", |knob| knob.option)
}

fn matched_speed(group: &Group<SpeedRow>, section: &mut Section) -> Result<String> {
    let Group { method, tokens: length, .. } = group;
    let mut settings: Vec<&Setting<SpeedRow>> = group.settings.iter().collect();
    settings.sort_by(|a, b| a.mean(|row| row.density).total_cmp(&b.mean(|row| row.density)));
    let header = [
        option(method),
        "density",
        "of the blocks",
        "selection",
        "whole",
        "random blocks",
        "dense",
        "ratio",
        "speed-up",
    ];
    let line = |own: &&Setting<SpeedRow>| {
        let whole = own.milliseconds(|row| row.seconds);
        let blocks = own.milliseconds(|row| row.block_seconds);
        let dense = own.milliseconds(|row| row.dense_seconds);
        vec![
            own.row().value.map_or("-".to_owned(), |value| value.to_string()),
            share(own.mean(|row| row.density), 3),
            share(own.mean(|row| row.block_density), 3),
            three_digits(own.milliseconds(|row| row.selection_seconds)),
            three_digits(whole),
            three_digits(blocks),
            three_digits(dense),
            three_digits(blocks / whole),
            three_digits(dense / whole),
        ]
    };
    let curve = |label: &str, density: fn(&SpeedRow) -> f64, seconds: fn(&SpeedRow) -> f64| Series {
        label: label.to_owned(),
        points: settings.iter().map(|own| (own.mean(density), own.milliseconds(seconds))).collect(),
        marks: true,
    };
    // Dense was measured again with every setting.
    let dense = median(settings.iter().map(|own| own.milliseconds(|row| row.dense_seconds)).collect());
    let plot = Lines {
        title: format!("{method}, {} tokens", tokens(*length)),
        x: Axis::linear("density"),
        y: Axis::linear("milliseconds"),
        series: vec![
            curve(method.split(':').next().unwrap_or(method), |row| row.density, |row| row.seconds),
            curve("random blocks", |row| row.block_density, |row| row.block_seconds),
        ],
        levels: vec![Level { label: "dense".to_owned(), y: dense }],
    };
    let name = format!("matched-speed-{}-{length}", slug(method));
    let description = format!("Time by density of {method} and of random blocks at {length} tokens");
    section.draw(name, description, (900, 560), plot)?;
    Ok(table(&header, settings.iter().map(line)))
}

pub const TAU_AND_SEGMENT: Experiment<GridRow> = Experiment {
    name: "tau-and-segment",
    columns: "method, tau, segment, layer, tokens, density, mse, rel_l1, selection_seconds, attention_seconds, \
              dense_seconds, speed_up",
    intro: "Density, relative L1 error and speed-up over our dense attention, for each tau and segment length in \
            tokens; means over the layers.",
    is_by_method: true,
    key: |row| {
        let setting = format!("`{}` with tau {} and segment {}", row.method, row.tau, row.segment);
        Key::new(&row.method, setting, row.layer, row.tokens)
    },
    render: tau_and_segment,
};

/// The picture has the error by density for each segment length; there is none if everything was computed.
fn tau_and_segment(group: &Group<GridRow>, section: &mut Section) -> Result<String> {
    let Group { method, tokens: length, settings, .. } = group;
    let taus = ascending(settings.iter().map(|own| own.row().tau));
    let segments = ascending(settings.iter().map(|own| own.row().segment));
    let setting =
        |tau: f64, segment: usize| settings.iter().find(|own| (own.row().tau, own.row().segment) == (tau, segment));
    let lines = taus.iter().map(|tau| (vec![tau.to_string()], *tau));
    let table = pivot(&["tau"], &with_unit("segment", &segments), lines, |&tau, &segment| {
        let own = setting(tau, segment)?;
        let [density, rel_l1] = [share(own.mean(|row| row.density), 3), share(own.mean(|row| row.rel_l1), 4)];
        let seconds = own.mean(|row| row.selection_seconds + row.attention_seconds);
        Some(format!("{density}, {rel_l1}, {}x", three_digits(own.mean(|row| row.dense_seconds) / seconds)))
    });
    let curve = |&segment: &usize| {
        let own = taus.iter().filter_map(|&tau| setting(tau, segment));
        let points = own.map(|own| (own.mean(|row| row.density), own.mean(|row| row.rel_l1)));
        // At density 1 the error is only rounding, far below that of sparsity.
        let points = points.filter(|point| point.0 < 1.0).collect();
        Series { label: format!("segment {segment}"), points, marks: true }
    };
    let series: Vec<Series> = segments.iter().map(curve).collect();
    if series.iter().all(|series| series.points.is_empty()) {
        return Ok(table);
    }
    let plot = Lines {
        title: format!("{method}, {} tokens", tokens(*length)),
        x: Axis::linear("density"),
        y: Axis::log10("relative L1 error"),
        series,
        ..Lines::default()
    };
    let name = format!("tau-and-segment-{}-{length}", slug(method));
    let description =
        format!("Relative L1 error of {method} by density at {length} tokens, one line for each segment length");
    section.draw(name, description, (900, 560), plot)?;
    Ok(table)
}

pub const COMPONENTS: Experiment<ComponentRow> = Experiment {
    name: "components",
    columns: "settings, component, dense_tail, layer, tokens, density, mse, mae, rel_l1, cosine, selection_seconds, \
              attention_seconds, dense_seconds, speed_up",
    intro: "Means over the layers; the dense tail in queries, speed-up over our dense attention.",
    is_by_method: false,
    key: |row| {
        let setting = format!("`{}` of {} with a dense tail of {}", row.component, row.settings, row.dense_tail);
        Key::new(&row.settings, setting, row.layer, row.tokens)
    },
    render: components,
};

/// A few numbers need no picture.
fn components(group: &Group<ComponentRow>, _section: &mut Section) -> Result<String> {
    let header = ["settings", "dense tail", "component", "density", "MSE", "relative L1", "speed-up"];
    let line = |own: &Setting<ComponentRow>| {
        let ComponentRow { settings, component, dense_tail, .. } = own.row();
        let seconds = own.mean(|row| row.selection_seconds + row.attention_seconds);
        vec![
            settings.clone(),
            dense_tail.to_string(),
            component.clone(),
            share(own.mean(|row| row.density), 3),
            error(own.mean(|row| row.mse)),
            share(own.mean(|row| row.rel_l1), 4),
            three_digits(own.mean(|row| row.dense_seconds) / seconds),
        ]
    };
    Ok(table(&header, group.settings.iter().map(line)))
}
